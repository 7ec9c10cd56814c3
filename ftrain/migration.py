"""What stands here for a name of the reference: `ftrain migrate AdamOptimizer`. There are no aliases."""

import difflib
import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counterpart:
    ours: tuple[str, ...]  # what does its job, by dotted names
    note: str = ""


def _to(*ours: str, note: str = "") -> Counterpart:
    return Counterpart(ours, note)


def find(name: str) -> tuple[str, Counterpart]:
    """The reference's full name and our counterpart, for a name with or without the modules in front of it.

    Capitals do not matter, and neither does a missing "Optimizer" at the end.
    """
    known = {_shorten(full).lower(): full for full in TABLE}
    short = _shorten(name)
    for written in (short.lower(), f"{short.lower()}optimizer"):
        if written in known:
            return known[written], TABLE[known[written]]
    near = difflib.get_close_matches(short, map(_shorten, TABLE), n=2, cutoff=0.7)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise LookupError(f"{name} is not a name of tf.train that has a counterpart here yet{hint}")


def _shorten(name: str) -> str:
    for module in ("tf.", "compat.v1.", "train."):
        name = name.removeprefix(module)
    return name


def resolve(dotted: str) -> Any:
    """The object that a dotted name stands for."""
    first, *rest = dotted.split(".")
    found = importlib.import_module(first)
    for name in rest:
        found = getattr(found, name)
    return found


_SCHEDULE = "without global_step: it returns a function of the step, to be given to an optimizer as its learning rate"
_OPTIMIZER = "an optax transform; use_locking and name are gone"

TABLE: dict[str, Counterpart] = {
    # the optimizer as such
    "tf.train.Optimizer": _to(
        "optax.GradientTransformation", "ftrain.optimizers.from_rule", note="write one elementwise rule for your own"
    ),
    "tf.train.Optimizer.minimize": _to("ftrain.make_step", note="a pure step: (state, batch) -> (state, metrics)"),
    "tf.train.Optimizer.compute_gradients": _to(
        "ftrain.gradients.value_and_grad",
        note="var_list is the argument that is differentiated; gate_gradients has no counterpart: XLA orders the work",
    ),
    "tf.train.Optimizer.apply_gradients": _to(
        "ftrain.apply_updates", note="updates, opt_state = optimizer.update(gradients, opt_state, params), then this"
    ),
    "tf.train.Optimizer.get_slot": _to("ftrain.optimizers.get_slot", note="get_slot(opt_state, 'dense/kernel', 'm')"),
    "tf.train.Optimizer.get_slot_names": _to("ftrain.optimizers.slot_names"),
    "tf.AggregationMethod": _to("jax.grad", note="XLA chooses how gradients are summed"),
    "tf.gradients": _to(
        "ftrain.gradients.value_and_grad",
        "jax.grad",
        "jax.vjp",
        note="grad_ys is the cotangent given to what jax.vjp returns; stop_gradients is jax.lax.stop_gradient",
    ),
    "tf.hessians": _to("jax.hessian"),
    "tf.stop_gradient": _to("jax.lax.stop_gradient"),
    "tf.IndexedSlices": _to("ftrain.gradients.Rows", note="to_dense(like) makes it whole"),
    "tf.nn.embedding_lookup": _to("ftrain.gradients.lookup", note="its table gets a gradient of rows"),
    "tf.gather": _to("ftrain.gradients.lookup", "jax.numpy.take"),
    # optimizers
    "tf.train.GradientDescentOptimizer": _to("ftrain.optimizers.gradient_descent", note=_OPTIMIZER),
    "tf.train.MomentumOptimizer": _to("ftrain.optimizers.momentum", note=_OPTIMIZER),
    "tf.train.AdagradOptimizer": _to("ftrain.optimizers.adagrad", note=_OPTIMIZER),
    "tf.train.AdagradDAOptimizer": _to(
        "ftrain.optimizers.adagrad_da", note=f"{_OPTIMIZER}; the updates so far stand for global_step"
    ),
    "tf.train.AdadeltaOptimizer": _to("ftrain.optimizers.adadelta", note=_OPTIMIZER),
    "tf.train.AdamOptimizer": _to(
        "ftrain.optimizers.adam",
        note=f"{_OPTIMIZER}; row-sparse gradients are lazy unless lazy=False, which is what the reference does",
    ),
    "tf.train.RMSPropOptimizer": _to("ftrain.optimizers.rmsprop", note=_OPTIMIZER),
    "tf.train.FtrlOptimizer": _to("ftrain.optimizers.ftrl", note=_OPTIMIZER),
    "tf.train.ProximalGradientDescentOptimizer": _to("ftrain.optimizers.proximal_gradient_descent", note=_OPTIMIZER),
    "tf.train.ProximalAdagradOptimizer": _to("ftrain.optimizers.proximal_adagrad", note=_OPTIMIZER),
    # gradients
    "tf.clip_by_value": _to("ftrain.gradients.clip_by_value"),
    "tf.clip_by_norm": _to("ftrain.gradients.clip_by_norm"),
    "tf.clip_by_average_norm": _to("ftrain.gradients.clip_by_average_norm"),
    "tf.clip_by_global_norm": _to(
        "ftrain.gradients.clip_by_global_norm", "ftrain.make_step", note="or make_step(..., clip_global_norm=1.0)"
    ),
    "tf.global_norm": _to("ftrain.gradients.global_norm"),
    "tf.train.experimental.FixedLossScale": _to(
        "ftrain.gradients.loss_scaling", note="loss_scaling(optimizer, scale=1024.0, dynamic=False)"
    ),
    "tf.train.experimental.DynamicLossScale": _to("ftrain.gradients.loss_scaling"),
    "tf.train.experimental.MixedPrecisionLossScaleOptimizer": _to("ftrain.gradients.loss_scaling"),
    "tf.train.experimental.enable_mixed_precision_graph_rewrite": _to(
        "ftrain.gradients.loss_scaling", note="cast in the model; loss_scaling(optimizer) does the rest"
    ),
    # schedules
    "tf.train.exponential_decay": _to("ftrain.schedules.exponential_decay", note=_SCHEDULE),
    "tf.train.natural_exp_decay": _to("ftrain.schedules.natural_exp_decay", note=_SCHEDULE),
    "tf.train.inverse_time_decay": _to("ftrain.schedules.inverse_time_decay", note=_SCHEDULE),
    "tf.train.polynomial_decay": _to("ftrain.schedules.polynomial_decay", note=_SCHEDULE),
    "tf.train.piecewise_constant": _to("ftrain.schedules.piecewise_constant", note=_SCHEDULE),
    "tf.train.piecewise_constant_decay": _to("ftrain.schedules.piecewise_constant", note=_SCHEDULE),
    "tf.train.cosine_decay": _to("ftrain.schedules.cosine_decay", note=_SCHEDULE),
    "tf.train.cosine_decay_restarts": _to("ftrain.schedules.cosine_decay_restarts", note=_SCHEDULE),
    "tf.train.linear_cosine_decay": _to("ftrain.schedules.linear_cosine_decay", note=_SCHEDULE),
    "tf.train.noisy_linear_cosine_decay": _to(
        "ftrain.schedules.noisy_linear_cosine_decay", note=f"{_SCHEDULE}; its noise is a function of seed and step"
    ),
    # averages
    "tf.train.ExponentialMovingAverage": _to(
        "ftrain.make_step",
        "ftrain.averages.update_averages",
        note="make_step(..., averages=0.999) keeps them in the state",
    ),
    "tf.train.ExponentialMovingAverage.apply": _to("ftrain.averages.update_averages", "ftrain.averages.ZeroDebiased"),
    "tf.train.ExponentialMovingAverage.average": _to("ftrain.TrainState", note="state.averages"),
    "tf.train.ExponentialMovingAverage.average_name": _to("ftrain.averages.average_names"),
    "tf.train.ExponentialMovingAverage.variables_to_restore": _to("ftrain.averages.average_names"),
    # sessions
    "tf.train.MonitoredTrainingSession": _to(
        "ftrain.Run", "ftrain.train", note="with Run(...) as run: while not run.should_stop(): run.advance()"
    ),
    "tf.train.MonitoredSession": _to("ftrain.training.Loop", note="the hooks you give, and no others"),
    "tf.train.SingularMonitoredSession": _to(
        "ftrain.training.Loop", note="Loop(..., recoveries=0) lets an error that could be retried pass"
    ),
    "tf.train.MonitoredSession.run": _to("ftrain.training.Loop.step", "ftrain.training.Loop.advance"),
    "tf.train.MonitoredSession.run_step_fn": _to(
        "ftrain.compile_step", note="a compiled step is a function: call it yourself where no hook should see it"
    ),
    "tf.train.MonitoredSession.should_stop": _to("ftrain.training.Loop.should_stop"),
    "tf.train.Supervisor": _to("ftrain.Run", note="saves, resumes, writes summaries and stops"),
    "tf.train.SessionManager": _to(
        "ftrain.training.Scaffold", note="restore, or else initialise; wait_secs makes others wait for the chief"
    ),
    "tf.train.SessionCreator": _to("ftrain.training.Scaffold"),
    "tf.train.ChiefSessionCreator": _to("ftrain.training.Scaffold", note="the default: restore, or else initialise"),
    "tf.train.WorkerSessionCreator": _to(
        "ftrain.training.Scaffold", note="Scaffold(wait_secs=7200) waits for the chief's checkpoint, with a limit"
    ),
    "tf.train.Scaffold": _to(
        "ftrain.training.Scaffold",
        note="init_fn, local_init_fn and ready_fn take the state; ready_fn says as text why it is not ready",
    ),
    "tf.train.basic_train_loop": _to("ftrain.train"),
    # hooks
    "tf.train.SessionRunHook": _to(
        "ftrain.Hook",
        note="begin, after_create_session, before_run, after_run, end are start, begin, before_step, after_step, end; "
        "a trigger chooses the steps of after_step, and the end of every hook is called even if another's fails",
    ),
    "tf.train.SessionRunArgs": _to(
        "ftrain.Hook.before_step", note="answers with entries for the batch; metrics need not be asked for"
    ),
    "tf.train.SessionRunContext": _to("ftrain.training.Report", note="report.stop(reason)"),
    "tf.train.SessionRunValues": _to("ftrain.training.Report", note="report.values(), report.read('loss')"),
    "tf.train.LoggingTensorHook": _to(
        "ftrain.hooks.Logging", note="any metric by name; the last line is not written twice"
    ),
    "tf.train.StopAtStepHook": _to(
        "ftrain.hooks.StopAtStep", note="a run that has come so far takes no further step; the reference takes one"
    ),
    "tf.train.CheckpointSaverHook": _to(
        "ftrain.hooks.CheckpointSaver",
        note="saves at multiples of the step, also after a restart, and not at the start unless at_start=True",
    ),
    "tf.train.CheckpointSaverListener": _to(
        "ftrain.hooks.SaveListener", note="its stop is heard at the first save too"
    ),
    "tf.train.StepCounterHook": _to("ftrain.hooks.StepCounter", note="steps, examples and operations per second"),
    "tf.train.NanTensorHook": _to(
        "ftrain.hooks.StopOnNaN", note="every step, without a wait; infinities count; action='stop' does not raise"
    ),
    "tf.train.NanLossDuringTrainingError": _to("ftrain.hooks.NotFiniteError"),
    "tf.train.SummarySaverHook": _to("ftrain.hooks.SummarySaver", note="the last step is written too"),
    "tf.train.GlobalStepWaiterHook": _to("ftrain.hooks.WaitForStep", note="the other run's newest checkpoint tells"),
    "tf.train.FinalOpsHook": _to("ftrain.hooks.FinalOps", note="a function of the final state; hook.result"),
    "tf.train.FeedFnHook": _to("ftrain.hooks.FeedBatch", note="a function of the step, whose entries join the batch"),
    "tf.train.ProfilerHook": _to("ftrain.hooks.Profiler"),
    "tf.train.SecondOrStepTimer": _to(
        "ftrain.every", "ftrain.training.timer", note="every() counts multiples of the step, timer() as the reference"
    ),
    # global step
    "tf.train.global_step": _to("ftrain.TrainState", note="int(state.step); run.steps_taken needs no device"),
    "tf.train.get_global_step": _to("ftrain.TrainState", note="state.step"),
    "tf.train.create_global_step": _to("ftrain.TrainState.create", note="every state has one, an int32 scalar"),
    "tf.train.get_or_create_global_step": _to("ftrain.TrainState.create", note="every state has one"),
    "tf.train.assert_global_step": _to("ftrain.TrainState.create", note="it is an int32 scalar by construction"),
    # threads
    "tf.train.Coordinator": _to("ftrain.coordination.Coordinator", note="EndOfData takes the place of OutOfRangeError"),
    "tf.train.LooperThread": _to("ftrain.coordination.LooperThread"),
    "tf.train.QueueRunner": _to("ftrain.data.Prefetcher", note="a run prefetches its data by itself"),
    "tf.train.queue_runner.QueueRunner": _to("ftrain.data.Prefetcher"),
    "tf.train.add_queue_runner": _to("ftrain.data.feed", note="not needed: a run prefetches its data by itself"),
    "tf.train.start_queue_runners": _to("ftrain.data.feed", note="not needed: a run prefetches its data by itself"),
    "tf.train.Saver": _to(
        "ftrain.checkpoints.CheckpointManager",
        note="max_to_keep is keep, keep_checkpoint_every_n_hours is keep_every_hours; it saves trees under numbers of "
        "steps, and writes over one only with overwrite=True",
    ),
    "tf.train.Saver.save": _to("ftrain.checkpoints.CheckpointManager.save"),
    "tf.train.Saver.restore": _to(
        "ftrain.checkpoints.CheckpointManager.restore", note="var_list is include, exclude and rename, by patterns"
    ),
    "tf.train.SaverDef": _to(
        "ftrain.checkpoints.CheckpointManager",
        note="its arguments; in a config, the table [checkpoint]",
    ),
    "tf.train.Checkpoint": _to(
        "ftrain.checkpoints.CheckpointManager",
        note="any tree is saved as it is; open_reader reads the reference's",
    ),
    "tf.train.CheckpointManager": _to("ftrain.checkpoints.CheckpointManager", note="max_to_keep is keep"),
    "tf.train.CheckpointOptions": _to("ftrain.checkpoints.CheckpointManager", note="its arguments"),
    "tf.train.checkpoint_exists": _to("ftrain.checkpoints.checkpoint_exists"),
    "tf.train.latest_checkpoint": _to("ftrain.checkpoints.latest_checkpoint", note="of TensorFlow's directories too"),
    "tf.train.get_checkpoint_state": _to(
        "ftrain.checkpoints.checkpoint_state",
        "ftrain.formats.parse_state",
        note="the second reads TensorFlow's own `checkpoint` file",
    ),
    "tf.train.update_checkpoint_state": _to(
        "ftrain.checkpoints.CheckpointManager", note="it keeps checkpoints.json itself, and mends it by what is on disk"
    ),
    "tf.train.generate_checkpoint_state_proto": _to(
        "ftrain.formats.format_state", note="the text of TensorFlow's `checkpoint` file"
    ),
    "tf.train.get_checkpoint_mtimes": _to(
        "ftrain.checkpoints.CheckpointManager.checkpoints", note="each record has the time of its save"
    ),
    "tf.train.remove_checkpoint": _to("ftrain.checkpoints.CheckpointManager.delete", note="or ftrain ckpt rm RUN STEP"),
    "tf.train.NewCheckpointReader": _to("ftrain.checkpoints.open_reader", note="reads TensorFlow's V2 files too"),
    "tf.train.load_checkpoint": _to("ftrain.checkpoints.open_reader", note="reads TensorFlow's V2 files too"),
    "tf.train.list_variables": _to("ftrain.checkpoints.list_variables", note="of TensorFlow's V2 files too"),
    "tf.train.load_variable": _to("ftrain.checkpoints.load_variable", note="of TensorFlow's V2 files too"),
    "tf.train.init_from_checkpoint": _to(
        "ftrain.checkpoints.init_from_checkpoint", note="answers with a new tree instead of changing variables"
    ),
    "tf.train.warm_start": _to(
        "ftrain.checkpoints.warm_start", note="answers with a new tree; give it the leaves that are to be trained"
    ),
    "tf.train.VocabInfo": _to("ftrain.checkpoints.VocabInfo"),
    "tf.train.checkpoints_iterator": _to("ftrain.checkpoints.checkpoints_iterator", "ftrain.evaluate_checkpoints"),
}
