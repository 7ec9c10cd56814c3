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
}
