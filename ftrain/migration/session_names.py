"""Sessions, hooks, the global step and threads: names of TensorFlow 1 and their counterparts."""

from ftrain.migration.counterpart import Counterpart, to

TABLE: dict[str, Counterpart] = {
    # sessions
    "tf.train.MonitoredTrainingSession": to(
        "ftrain.Run",
        "ftrain.train",
        note="with Run(...) as run: while not run.should_stop(): run.advance()",
    ),
    "tf.train.MonitoredSession": to(
        "ftrain.training.Loop", note="the hooks you give, and no others"
    ),
    "tf.train.SingularMonitoredSession": to(
        "ftrain.training.Loop",
        note="Loop(..., recoveries=0) lets an error that could be retried pass",
    ),
    "tf.train.MonitoredSession.run": to(
        "ftrain.training.Loop.step", "ftrain.training.Loop.advance"
    ),
    "tf.train.MonitoredSession.run_step_fn": to(
        "ftrain.compile_step",
        note="a compiled step is a function: call it yourself where no hook should see it",
    ),
    "tf.train.MonitoredSession.should_stop": to("ftrain.training.Loop.should_stop"),
    "tf.train.Supervisor": to("ftrain.Run", note="saves, resumes, writes summaries and stops"),
    "tf.train.SessionManager": to(
        "ftrain.training.Scaffold",
        note="restore, or else initialise; wait_secs makes others wait for the chief",
    ),
    "tf.train.SessionCreator": to("ftrain.training.Scaffold"),
    "tf.train.ChiefSessionCreator": to(
        "ftrain.training.Scaffold", note="the default: restore, or else initialise"
    ),
    "tf.train.WorkerSessionCreator": to(
        "ftrain.training.Scaffold",
        note="Scaffold(wait_secs=7200) waits for the chief's checkpoint, with a limit, and saves nothing itself",
    ),
    "tf.train.Scaffold": to(
        "ftrain.training.Scaffold",
        note="init_fn, local_init_fn and ready_fn take the state; ready_fn returns as text why it is not ready",
    ),
    "tf.train.basic_train_loop": to("ftrain.train"),
    # hooks
    "tf.train.SessionRunHook": to(
        "ftrain.Hook",
        note="begin, after_create_session, before_run, after_run, end are start, begin, before_step, after_step, end; "
        "a trigger chooses the steps of after_step, and the end of every hook is called even if another's fails",
    ),
    "tf.train.SessionRunArgs": to(
        "ftrain.Hook.before_step",
        note="returns entries for the batch; metrics are always available",
    ),
    "tf.train.SessionRunContext": to("ftrain.training.Report", note="report.stop(reason)"),
    "tf.train.SessionRunValues": to(
        "ftrain.training.Report", note="report.values(), report.read('loss')"
    ),
    "tf.train.LoggingTensorHook": to(
        "ftrain.hooks.Logging", note="any metric by name; the last line is not written twice"
    ),
    "tf.train.StopAtStepHook": to(
        "ftrain.hooks.StopAtStep",
        note="num_steps count from the start of each run, resumed or not; a run that is there takes no further step",
    ),
    "tf.train.CheckpointSaverHook": to(
        "ftrain.hooks.CheckpointSaver",
        note="saves at multiples of the step, also after a restart, and not at the start unless at_start=True",
    ),
    "tf.train.CheckpointSaverListener": to(
        "ftrain.hooks.SaveListener", note="its request to stop counts at the first save too"
    ),
    "tf.train.StepCounterHook": to(
        "ftrain.hooks.StepCounter", note="steps, examples and operations per second"
    ),
    "tf.train.NanTensorHook": to(
        "ftrain.hooks.StopOnNaN",
        note="every step, without a wait; infinities count; action='stop' does not raise",
    ),
    "tf.train.NanLossDuringTrainingError": to("ftrain.hooks.NotFiniteError"),
    "tf.train.SummarySaverHook": to(
        "ftrain.hooks.SummarySaver", note="the last step is written too"
    ),
    "tf.train.GlobalStepWaiterHook": to(
        "ftrain.hooks.WaitForStep", note="it reads the other run's newest checkpoint"
    ),
    "tf.train.FinalOpsHook": to(
        "ftrain.hooks.FinalOps", note="a function of the final state; hook.result"
    ),
    "tf.train.FeedFnHook": to(
        "ftrain.hooks.FeedBatch", note="a function of the step, whose entries join the batch"
    ),
    "tf.train.ProfilerHook": to(
        "ftrain.hooks.Profiler", note="save_steps is every_steps; each trace names its step"
    ),
    "tf.train.SecondOrStepTimer": to(
        "ftrain.every",
        "ftrain.training.timer",
        note="every() counts multiples of the step, timer() as TF1",
    ),
    # global step
    "tf.train.global_step": to(
        "ftrain.TrainState", note="int(state.step); run.steps_taken needs no device"
    ),
    "tf.train.get_global_step": to("ftrain.TrainState", note="state.step"),
    "tf.train.create_global_step": to(
        "ftrain.TrainState.create", note="every state has one, an int32 scalar"
    ),
    "tf.train.get_or_create_global_step": to(
        "ftrain.TrainState.create", note="every state has one"
    ),
    "tf.train.assert_global_step": to(
        "ftrain.TrainState.create", note="it is an int32 scalar by construction"
    ),
    # threads
    "tf.train.Coordinator": to(
        "ftrain.coordination.Coordinator", note="EndOfData takes the place of OutOfRangeError"
    ),
    "tf.train.LooperThread": to("ftrain.coordination.LooperThread"),
    "tf.train.QueueRunner": to(
        "ftrain.data.Prefetcher", note="a run prefetches its data by itself"
    ),
    "tf.train.queue_runner.QueueRunner": to("ftrain.data.Prefetcher"),
    "tf.train.add_queue_runner": to(
        "ftrain.data.feed", note="not needed: a run prefetches its data by itself"
    ),
    "tf.train.start_queue_runners": to(
        "ftrain.data.feed", note="not needed: a run prefetches its data by itself"
    ),
}
