"""The loss: a loss function with metrics and model state, and its gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ftrain.gradients import loss_scale, map_values, value_and_grad
from ftrain.gradients.accumulation import Differentiated, average
from ftrain.gradients.means import WeightedMean, is_weighted
from ftrain.training.state import TrainState
from ftrain.tree import Tree, wide_dtype, widen

Batch = Any  # a pytree of arrays with a leading axis of examples, most often a dict
Metrics = dict[str, jax.Array]

# (params, batch, rng) -> loss | (loss, metrics)
# or, with a model state: (params, batch, rng, model_state) -> (loss, metrics, model_state)
# where the loss and each metric is a scalar, a mean over examples, or a WeightedMean
LossFunction = Callable[..., Any]

# (params, batch, rng, model_state) -> (loss, (metrics, model_state))
Objective = Callable[..., Any]


def make_objective(loss_fn: LossFunction, with_model_state: bool) -> Objective:
    """`loss_fn` in one form: it always takes and returns the model state, and returns metrics."""

    def objective(params: Tree, batch: Batch, rng: jax.Array, model_state: Tree):
        if with_model_state:
            loss, metrics, model_state = loss_fn(params, batch, rng, model_state)
        else:
            result = loss_fn(params, batch, rng)
            loss, metrics = (
                result if isinstance(result, tuple) and len(result) == 2 else (result, {})
            )
        _check_result(loss, metrics)
        return loss, (dict(metrics), model_state)

    return objective


def differentiate(
    objective: Objective,
    state: TrainState,
    batch: Batch,
    rng: jax.Array,
    parts: int,
    *,
    merge_rows: bool = True,
) -> tuple[Differentiated, Tree]:
    """Return loss, metrics, gradients and new model state of a batch in `parts` microbatches."""
    scale = loss_scale(state.opt_state)

    def scaled(params: Tree, batch: Batch, rng: jax.Array, model_state: Tree):
        loss, (metrics, model_state) = objective(params, batch, rng, model_state)
        return _scale(loss, scale), (loss, metrics, model_state)

    def part(
        model_state: Tree, number: jax.Array | None, batch: Batch
    ) -> tuple[Tree, Differentiated]:
        own_rng = rng if number is None else jax.random.fold_in(rng, number)
        followed = value_and_grad(scaled, has_aux=True, merge_rows=merge_rows)
        (_, (loss, metrics, model_state)), gradients = followed(
            state.params, batch, own_rng, model_state
        )
        if scale is not None:
            gradients = _unscale(gradients, scale)
        return model_state, Differentiated(loss, metrics, gradients)

    if parts == 1:
        model_state, found = part(state.model_state, None, batch)
    else:
        model_state, found = average(part, state.model_state, batch, parts, merge_rows=merge_rows)
    return found, model_state


def _scale(loss: Any, scale: jax.Array | None) -> Any:
    if scale is None:
        return loss
    if is_weighted(loss):
        return WeightedMean(widen(loss.total) * scale, loss.weight)
    return widen(loss) * scale


def _unscale(gradients: Tree, scale: jax.Array) -> Tree:
    """Divide in float32: in half precision small gradients would become zero."""
    return map_values(lambda leaf: widen(leaf) / scale.astype(wide_dtype(leaf)), gradients)


def _check_result(loss: Any, metrics: Any) -> None:
    if loss is None or isinstance(loss, (tuple, list, dict, str)):
        raise TypeError(
            f"loss_fn must return a scalar loss, or a loss and a dict of metrics, got {loss!r:.80}"
        )
    for leaf in jax.tree.leaves(loss):  # of a WeightedMean: its total and its weight
        if jnp.ndim(leaf) != 0:
            raise ValueError(
                f"loss_fn must return a scalar loss, got shape {jnp.shape(leaf)}; take its mean"
            )
    if not isinstance(metrics, Mapping):
        raise TypeError(f"loss_fn must return its metrics as a dict, got {type(metrics).__name__}")
    for name, value in metrics.items():
        for leaf in jax.tree.leaves(value) if is_weighted(value) else [value]:
            if jnp.ndim(leaf) != 0:
                raise ValueError(
                    f"metric {name} must be a scalar, got shape {jnp.shape(leaf)}; take its mean"
                )
