"""Sessions, hooks, threads, checkpoints, clusters: names of TensorFlow 1 and counterparts."""

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
        note="Scaffold(wait_secs=7200) waits for the chief's checkpoint, with a limit, and saves "
        "nothing itself",
    ),
    "tf.train.Scaffold": to(
        "ftrain.training.Scaffold",
        note="init_fn, local_init_fn and ready_fn take the state; ready_fn returns the reason if "
        "it is not ready",
    ),
    "tf.train.basic_train_loop": to("ftrain.train"),
    # hooks
    "tf.train.SessionRunHook": to(
        "ftrain.Hook",
        note="after_create_session, before_run, after_run and end are begin, before_step, "
        "after_step and end; a Scaffold prepares the state; a trigger selects the steps of "
        "after_step; the end of every hook is called even if that of another one fails",
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
        note="num_steps counts from the start of each run, resumed or not; a run that has reached "
        "the step takes no further one",
    ),
    "tf.train.CheckpointSaverHook": to(
        "ftrain.hooks.CheckpointSaver",
        note="saves at multiples of the step, also after a restart, and not at the start unless "
        "at_start=True",
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
    "tf.train.NanLossDuringTrainingError": to("ftrain.hooks.NonFiniteError"),
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
    # checkpoints
    "tf.train.Saver": to(
        "ftrain.checkpoints.CheckpointManager",
        note="max_to_keep is keep, keep_checkpoint_every_n_hours is keep_every_hours; it saves "
        "trees by step, and replaces one only with overwrite=True",
    ),
    "tf.train.Saver.save": to("ftrain.checkpoints.CheckpointManager.save"),
    "tf.train.Saver.restore": to(
        "ftrain.checkpoints.CheckpointManager.restore",
        note="var_list is include, exclude and rename, by patterns",
    ),
    "tf.train.SaverDef": to(
        "ftrain.checkpoints.CheckpointManager",
        note="its arguments; in a config, the table [checkpoint]",
    ),
    "tf.train.Checkpoint": to(
        "ftrain.checkpoints.CheckpointManager",
        note="any tree is saved as it is; open_reader reads TF1's",
    ),
    "tf.train.CheckpointManager": to(
        "ftrain.checkpoints.CheckpointManager", note="max_to_keep is keep"
    ),
    "tf.train.CheckpointOptions": to("ftrain.checkpoints.CheckpointManager", note="its arguments"),
    "tf.train.checkpoint_exists": to("ftrain.checkpoints.checkpoint_exists"),
    "tf.train.latest_checkpoint": to(
        "ftrain.checkpoints.latest_checkpoint", note="of TensorFlow's directories too"
    ),
    "tf.train.get_checkpoint_state": to(
        "ftrain.checkpoints.checkpoint_state",
        "ftrain.formats.parse_state",
        note="the second reads TensorFlow's own `checkpoint` file",
    ),
    "tf.train.update_checkpoint_state": to(
        "ftrain.checkpoints.CheckpointManager",
        note="it writes checkpoints.json itself, and repairs it from the files on disk",
    ),
    "tf.train.generate_checkpoint_state_proto": to(
        "ftrain.formats.format_state", note="the text of TensorFlow's `checkpoint` file"
    ),
    "tf.train.get_checkpoint_mtimes": to(
        "ftrain.checkpoints.CheckpointManager.checkpoints",
        note="each record has the time of its save",
    ),
    "tf.train.remove_checkpoint": to(
        "ftrain.checkpoints.CheckpointManager.delete", note="or ftrain ckpt rm RUN STEP"
    ),
    "tf.train.NewCheckpointReader": to(
        "ftrain.checkpoints.open_reader", note="reads TensorFlow's V2 files too"
    ),
    "tf.train.load_checkpoint": to(
        "ftrain.checkpoints.open_reader", note="reads TensorFlow's V2 files too"
    ),
    "tf.train.list_variables": to(
        "ftrain.checkpoints.list_variables", note="of TensorFlow's V2 files too"
    ),
    "tf.train.load_variable": to(
        "ftrain.checkpoints.load_variable", note="of TensorFlow's V2 files too"
    ),
    "tf.train.init_from_checkpoint": to(
        "ftrain.checkpoints.init_from_checkpoint",
        note="returns a new tree instead of changing variables",
    ),
    "tf.train.warm_start": to(
        "ftrain.checkpoints.warm_start",
        note="returns a new tree; pass the leaves to train",
    ),
    "tf.train.VocabInfo": to("ftrain.checkpoints.VocabInfo"),
    "tf.train.checkpoints_iterator": to(
        "ftrain.checkpoints.checkpoints_iterator", "ftrain.evaluate_checkpoints"
    ),
    # jobs and tasks
    "tf.train.ClusterSpec": to(
        "ftrain.cluster.ClusterSpec", note="the same class; also ClusterSpec.load('nodes.toml')"
    ),
    "tf.train.ClusterSpec.as_cluster_def": to(
        "ftrain.cluster.ClusterSpec.as_cluster_def",
        note="a dict, the message's JSON form; as_cluster_def_text() is its text format",
    ),
    "tf.train.ClusterSpec.as_dict": to("ftrain.cluster.ClusterSpec.as_dict"),
    "tf.train.ClusterSpec.job_tasks": to("ftrain.cluster.ClusterSpec.job_tasks"),
    "tf.train.ClusterSpec.jobs": to("ftrain.cluster.ClusterSpec", note="spec.jobs"),
    "tf.train.ClusterSpec.num_tasks": to("ftrain.cluster.ClusterSpec.num_tasks"),
    "tf.train.ClusterSpec.task_address": to("ftrain.cluster.ClusterSpec.task_address"),
    "tf.train.ClusterSpec.task_indices": to("ftrain.cluster.ClusterSpec.task_indices"),
    "tf.train.ClusterDef": to(
        "ftrain.cluster.ClusterSpec",
        note="made from the message as well, or from the same as a dict",
    ),
    "tf.train.JobDef": to(
        "ftrain.cluster.ClusterSpec",
        note="a job is a list of addresses, or a dict of index to address",
    ),
    # servers
    "tf.train.ServerDef": to(
        "ftrain.cluster.Membership",
        "ftrain.cluster.membership",
        note="the spec with the job and index of this process; membership() reads TF_CONFIG, "
        "SLURM, Kubernetes and MPI",
    ),
    "tf.train.Server": to(
        "ftrain.cluster.connect", note="joins the processes; there is no server to send graphs to"
    ),
    "tf.train.Server.create_local_server": to(
        "ftrain.cluster.create_local", note="a process group of one"
    ),
    "tf.train.Server.target": to(
        "ftrain.cluster.connect",
        note="not needed: once connected, every process runs the same program",
    ),
    "tf.train.Server.server_def": to("ftrain.cluster.Membership"),
    "tf.train.Server.start": to("ftrain.cluster.connect", note="not needed: connecting starts it"),
    "tf.train.Server.join": to(
        "ftrain.cluster.connect",
        note="not needed: no process only serves; parameters live on the devices of the mesh",
    ),
    # placement
    "tf.train.replica_device_setter": to(
        "ftrain.cluster.Sharding",
        "ftrain.migration.replica_device_setter",
        note="Sharding replaces it and splits parameters over the mesh; the other only reports "
        "where TF1 placed variables",
    ),
    "tf.contrib.training.GreedyLoadBalancingStrategy": to(
        "ftrain.migration.greedy_by_bytes",
        note="replica_device_setter(ps_strategy=greedy_by_bytes)",
    ),
    "tf.contrib.training.byte_size_load_fn": to(
        "ftrain.migration.Operation", note="operation.nbytes"
    ),
}
