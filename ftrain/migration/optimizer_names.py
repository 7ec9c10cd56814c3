"""Optimizers, gradients, schedules and averages: names of TensorFlow 1 and their counterparts."""

from ftrain.migration.counterpart import Counterpart, to

_SCHEDULE = (
    "without global_step: it returns a function of the step, the learning_rate of an optimizer"
)
_OPTIMIZER = "an optax transform, without use_locking and name"
_SYNC_REPLICAS = (
    f"{_OPTIMIZER}; update(gradients, opt_state, params, contributions=1, local_step=step) is one "
    "arrival; variable_averages is averages=0.999, of all parameters, and its num_updates is "
    "averages_ramp=True"
)
_NO_QUEUES = "not needed, as nothing runs beside the step: "


def _sync_replicas(name: str, note: str) -> dict[str, Counterpart]:
    """Return the counterparts of a class and its methods, which both versions have."""
    return {
        name: to("ftrain.optimizers.sync_replicas", note=note),
        f"{name}.minimize": to(
            "ftrain.make_step", note="make_step(loss_fn, sync_replicas(...)): a step is an arrival"
        ),
        f"{name}.compute_gradients": to(
            "ftrain.gradients.value_and_grad", note="clip what it returns, if you clip"
        ),
        f"{name}.apply_gradients": to(
            "ftrain.apply_updates",
            "ftrain.optimizers.arrivals",
            note="updates, opt_state = optimizer.update(gradients, opt_state, params, "
            "local_step=step), then this; the next step = arrivals(opt_state).updates replaces "
            "the token",
        ),
        f"{name}.get_slot": to(
            "ftrain.optimizers.get_slot", note="get_slot(opt_state, 'dense/kernel', 'm')"
        ),
        f"{name}.get_slot_names": to("ftrain.optimizers.slot_names"),
        f"{name}.variables": to(
            "ftrain.optimizers.sync_replicas", note="the state that its init(params) returns"
        ),
        f"{name}.get_chief_queue_runner": to(
            "ftrain.optimizers.sync_replicas",
            note=f"{_NO_QUEUES}the arrival that completes a round applies its update",
        ),
        f"{name}.get_init_tokens_op": to(
            "ftrain.optimizers.arrivals",
            note=f"{_NO_QUEUES}arrivals(opt_state).updates is the value of a token",
        ),
        f"{name}.make_session_run_hook": to(
            "ftrain.optimizers.sync_replicas",
            note=f"{_NO_QUEUES}init(params) is all that a run needs",
        ),
    }


TABLE: dict[str, Counterpart] = {
    # the optimizer as such
    "tf.train.Optimizer": to(
        "optax.GradientTransformation",
        "ftrain.optimizers.from_rule",
        note="write one elementwise rule for your own",
    ),
    "tf.train.Optimizer.minimize": to(
        "ftrain.make_step", note="a pure step: (state, batch) -> (state, metrics)"
    ),
    "tf.train.Optimizer.compute_gradients": to(
        "ftrain.gradients.value_and_grad",
        note="var_list is the argument that is differentiated; gate_gradients has no counterpart: "
        "XLA orders the work",
    ),
    "tf.train.Optimizer.apply_gradients": to(
        "ftrain.apply_updates",
        note="updates, opt_state = optimizer.update(gradients, opt_state, params), then this",
    ),
    "tf.train.Optimizer.get_slot": to(
        "ftrain.optimizers.get_slot", note="get_slot(opt_state, 'dense/kernel', 'm')"
    ),
    "tf.train.Optimizer.get_slot_names": to("ftrain.optimizers.slot_names"),
    "tf.AggregationMethod": to("jax.grad", note="XLA chooses how gradients are summed"),
    "tf.gradients": to(
        "ftrain.gradients.value_and_grad",
        "jax.grad",
        "jax.vjp",
        note="grad_ys is the cotangent for the function that jax.vjp returns; stop_gradients is "
        "jax.lax.stop_gradient",
    ),
    "tf.hessians": to("jax.hessian"),
    "tf.stop_gradient": to("jax.lax.stop_gradient"),
    "tf.IndexedSlices": to("ftrain.gradients.Rows", note="to_dense(like) makes it whole"),
    "tf.nn.embedding_lookup": to(
        "ftrain.gradients.lookup", note="its table gets a gradient of rows"
    ),
    "tf.gather": to("ftrain.gradients.lookup", "jax.numpy.take"),
    # optimizers
    "tf.train.GradientDescentOptimizer": to("ftrain.optimizers.gradient_descent", note=_OPTIMIZER),
    "tf.train.MomentumOptimizer": to("ftrain.optimizers.momentum", note=_OPTIMIZER),
    "tf.train.AdagradOptimizer": to("ftrain.optimizers.adagrad", note=_OPTIMIZER),
    "tf.train.AdagradDAOptimizer": to(
        "ftrain.optimizers.adagrad_da",
        note=f"{_OPTIMIZER}; the updates so far stand for global_step",
    ),
    "tf.train.AdadeltaOptimizer": to("ftrain.optimizers.adadelta", note=_OPTIMIZER),
    "tf.train.AdamOptimizer": to(
        "ftrain.optimizers.adam",
        note=f"{_OPTIMIZER}; row-sparse gradients are lazy unless lazy=False, as in TF1",
    ),
    "tf.train.RMSPropOptimizer": to("ftrain.optimizers.rmsprop", note=_OPTIMIZER),
    "tf.train.FtrlOptimizer": to("ftrain.optimizers.ftrl", note=_OPTIMIZER),
    "tf.train.ProximalGradientDescentOptimizer": to(
        "ftrain.optimizers.proximal_gradient_descent", note=_OPTIMIZER
    ),
    "tf.train.ProximalAdagradOptimizer": to("ftrain.optimizers.proximal_adagrad", note=_OPTIMIZER),
    # replicas
    **_sync_replicas(
        "tf.train.SyncReplicasOptimizer",
        f"{_SYNC_REPLICAS}; gradients are averaged: up to 0.12 this class summed them, at a "
        "smaller learning rate",
    ),
    "tf.train.SyncReplicasOptimizer.get_clean_up_op": to(
        "ftrain.optimizers.sync_replicas",
        note=f"{_NO_QUEUES}stale gradients are dropped as they arrive",
    ),
    **_sync_replicas("tf.train.SyncReplicasOptimizerV2", _SYNC_REPLICAS),
    # gradients
    "tf.clip_by_value": to("ftrain.gradients.clip_by_value"),
    "tf.clip_by_norm": to("ftrain.gradients.clip_by_norm"),
    "tf.clip_by_average_norm": to("ftrain.gradients.clip_by_average_norm"),
    "tf.clip_by_global_norm": to(
        "ftrain.gradients.clip_by_global_norm",
        "ftrain.make_step",
        note="or make_step(..., clip_global_norm=1.0), which sums rows that a batch reads twice "
        "before it takes the norm; merge_rows=False takes the norm of IndexedSlices, in which they "
        "count twice",
    ),
    "tf.global_norm": to("ftrain.gradients.global_norm"),
    "tf.train.experimental.FixedLossScale": to(
        "ftrain.gradients.loss_scaling", note="loss_scaling(optimizer, scale=1024.0, dynamic=False)"
    ),
    "tf.train.experimental.DynamicLossScale": to("ftrain.gradients.loss_scaling"),
    "tf.train.experimental.MixedPrecisionLossScaleOptimizer": to("ftrain.gradients.loss_scaling"),
    "tf.train.experimental.enable_mixed_precision_graph_rewrite": to(
        "ftrain.gradients.loss_scaling",
        note="cast in the model; loss_scaling(optimizer) does the rest",
    ),
    # schedules
    "tf.train.exponential_decay": to("ftrain.schedules.exponential_decay", note=_SCHEDULE),
    "tf.train.natural_exp_decay": to("ftrain.schedules.natural_exp_decay", note=_SCHEDULE),
    "tf.train.inverse_time_decay": to("ftrain.schedules.inverse_time_decay", note=_SCHEDULE),
    "tf.train.polynomial_decay": to("ftrain.schedules.polynomial_decay", note=_SCHEDULE),
    "tf.train.piecewise_constant": to("ftrain.schedules.piecewise_constant", note=_SCHEDULE),
    "tf.train.piecewise_constant_decay": to("ftrain.schedules.piecewise_constant", note=_SCHEDULE),
    "tf.train.cosine_decay": to("ftrain.schedules.cosine_decay", note=_SCHEDULE),
    "tf.train.cosine_decay_restarts": to("ftrain.schedules.cosine_decay_restarts", note=_SCHEDULE),
    "tf.train.linear_cosine_decay": to("ftrain.schedules.linear_cosine_decay", note=_SCHEDULE),
    "tf.train.noisy_linear_cosine_decay": to(
        "ftrain.schedules.noisy_linear_cosine_decay",
        note=f"{_SCHEDULE}; its noise is a function of seed and step",
    ),
    # averages
    "tf.train.ExponentialMovingAverage": to(
        "ftrain.make_step",
        "ftrain.averages.update_averages",
        note="make_step(..., averages=0.999) keeps them in the state; averages_ramp=True is "
        "num_updates=global_step; "
        'TrainState.create(..., averages="encoder/.*") is var_list',
    ),
    "tf.train.ExponentialMovingAverage.apply": to(
        "ftrain.averages.update_averages", "ftrain.averages.ZeroDebiased"
    ),
    "tf.train.ExponentialMovingAverage.average": to("ftrain.TrainState", note="state.averages"),
    "tf.train.ExponentialMovingAverage.average_name": to("ftrain.averages.average_names"),
    "tf.train.ExponentialMovingAverage.variables_to_restore": to("ftrain.averages.average_names"),
}
