"""The training step: a pure function, and its compilation for a mesh as a second, separate one."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftrain.averages import update_averages
from ftrain.cluster import mesh as meshes
from ftrain.gradients import clip_by_global_norm, global_norm
from ftrain.optimizers import LearningRate, apply_updates, current_learning_rate
from ftrain.training.state import TrainState
from ftrain.tree import Tree, named_leaves

Batch = Any  # a pytree of arrays with a leading axis of examples, most often a dict
Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
M = TypeVar("M")

# (params, batch, rng) -> loss | (loss, metrics)
# or, with a model state: (params, batch, rng, model_state) -> (loss, metrics, model_state)
LossFunction = Callable[..., Any]


def make_step(
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    clip_global_norm: float | None = None,
    averages: float | None = None,
    with_model_state: bool = False,
    learning_rate: LearningRate | None = None,
) -> Step:
    """The pure step `(state, batch) -> (state, metrics)` that follows the gradient of `loss_fn`.

    Metrics are those of the loss function and always `loss`, `learning_rate` and `gradient_norm` (before clipping).

    Args:
      loss_fn: `(params, batch, rng) -> loss` or `-> (loss, metrics)`; with `with_model_state`,
        `(params, batch, rng, model_state) -> (loss, metrics, model_state)`.
      clip_global_norm: the length that gradients are scaled down to.
      averages: the decay of moving averages of the parameters; create the state with `averages=True`.
      learning_rate: shown in the metrics for an optimizer whose state does not tell its rate, as plain optax ones;
        without it they show NaN.
    """
    if clip_global_norm is not None and clip_global_norm <= 0:
        raise ValueError(f"clip_global_norm must be > 0, got {clip_global_norm}")
    if averages is not None and not 0 <= averages < 1:
        raise ValueError(f"averages must be a decay in [0, 1), got {averages}")
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"optimizer must be an optax.GradientTransformation, such as adam(0.001), got {optimizer!r}")
    objective = _with_auxiliaries(loss_fn, with_model_state)
    optimizer = optax.with_extra_args_support(optimizer)  # some look at the loss, or search along a line

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _check_params(state.params)
        rng = jax.random.fold_in(state.rng, state.step)
        differentiate = jax.value_and_grad(objective, has_aux=True)
        (loss, (metrics, model_state)), gradients = differentiate(state.params, batch, rng, state.model_state)
        norm = global_norm(gradients)
        if clip_global_norm is not None:
            gradients, _ = clip_by_global_norm(gradients, clip_global_norm, use_norm=norm)
        updates, opt_state = optimizer.update(
            gradients,
            state.opt_state,
            state.params,
            value=loss,
            grad=gradients,
            value_fn=lambda params: objective(params, batch, rng, state.model_state)[0],
        )
        params = apply_updates(state.params, updates)
        new_state = state.replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            averages=_average(state, params, averages),
            model_state=model_state,
        )
        rate = _shown_rate(opt_state, learning_rate, state.step)
        own = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
        return new_state, {**own, **metrics, **own}  # ours come first, and a metric of the same name gives way

    return step


def compile_step(
    step: Callable[[TrainState, Batch], tuple[TrainState, M]], mesh: Mesh | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, M]]:
    """`step` compiled, its state updated in place: the state that goes in cannot be used again.

    On a mesh the state is replicated and the batch is split along its first axis.
    """
    if mesh is None or mesh.size == 1:
        return jax.jit(step, donate_argnums=0)
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(meshes.DATA))
    return jax.jit(step, donate_argnums=0, in_shardings=(replicated, split), out_shardings=replicated)


def _with_auxiliaries(loss_fn: LossFunction, with_model_state: bool) -> Callable[..., Any]:
    """`loss_fn` in its fullest form: always with metrics and model state."""

    def objective(params: Tree, batch: Batch, rng: jax.Array, model_state: Tree):
        if with_model_state:
            loss, metrics, model_state = loss_fn(params, batch, rng, model_state)
        else:
            result = loss_fn(params, batch, rng)
            loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        _check_result(loss, metrics)
        return loss, (dict(metrics), model_state)

    return objective


def _check_params(params: Tree) -> None:
    for name, leaf in named_leaves(params).items():
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"parameter {name} is {leaf.dtype}, which has no gradient; keep what is not trained in model_state"
            )


def _check_result(loss: Any, metrics: Any) -> None:
    if loss is None or isinstance(loss, (tuple, list, dict, str)):
        raise TypeError(f"loss_fn must return a scalar loss, or a loss and a dict of metrics, got {loss!r:.80}")
    if jnp.ndim(loss) != 0:
        raise ValueError(f"loss_fn must return a scalar loss, got shape {jnp.shape(loss)}; take its mean")
    if not isinstance(metrics, Mapping):
        raise TypeError(f"loss_fn must return its metrics as a dict, got {type(metrics).__name__}")
    for name, value in metrics.items():
        if jnp.ndim(value) != 0:
            raise ValueError(f"metric {name} must be a scalar, got shape {jnp.shape(value)}; take its mean")


def _average(state: TrainState, params: Tree, decay: float | None) -> Tree | None:
    if decay is None:
        return state.averages
    if state.averages is None:
        raise ValueError("this step keeps averages: create its state with TrainState.create(..., averages=True)")
    return update_averages(state.averages, params, decay, state.step)


def _shown_rate(opt_state: Tree, learning_rate: LearningRate | None, step: jax.Array) -> jax.Array:
    """The rate that the optimizer's state tells, or else the one given, or else NaN for not known."""
    told = current_learning_rate(opt_state)
    if told is not None:
        return told
    value = learning_rate(step) if callable(learning_rate) else learning_rate
    return jnp.asarray(jnp.nan if value is None else value, jnp.float32)
