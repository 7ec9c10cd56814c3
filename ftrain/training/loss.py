"""The loss: a loss function with metrics and model state, and its gradients."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ftrain.gradients import loss_scale, map_values, value_and_grad
from ftrain.gradients.accumulation import Differentiated, average
from ftrain.gradients.means import WeightedMean, is_weighted
from ftrain.optimizers.frozen import fill_in, without
from ftrain.optimizers.parameter_group import frozen_names
from ftrain.training.state import TrainState
from ftrain.tree import Tree, wide_dtype, widen

Batch = Any  # a pytree of arrays with a leading axis of examples, most often a dict
Metrics = dict[str, jax.Array]

# (params, batch, rng) -> loss | (loss, metrics)
# or, if the state has a model state:
# (params, batch, rng, model_state) -> (loss, metrics, model_state)
# where the loss and each metric is a scalar, a mean over examples, or a WeightedMean
LossFunction = Callable[..., Any]

# (params, batch, rng, model_state) -> (loss, (metrics, model_state))
Objective = Callable[..., Any]


def make_objective(loss_fn: LossFunction) -> Objective:
    """Wrap `loss_fn`: the result always takes and returns a model state, and returns metrics."""

    def objective(params: Tree, batch: Batch, rng: jax.Array, model_state: Tree):
        result = call_loss(loss_fn, params, batch, rng, model_state)
        if model_state is not None:
            loss, metrics, model_state = result
        elif isinstance(result, tuple) and len(result) == 2:
            loss, metrics = result
        else:
            loss, metrics = result, {}
        _check_result(loss, metrics)
        return loss, (dict(metrics), model_state)

    return objective


def call_loss(
    loss_fn: LossFunction, params: Tree, batch: Batch, rng: jax.Array, model_state: Tree | None
) -> Any:
    """Call a loss function in the form that fits: with the model state if there is one.

    Raises TypeError if the function is of the other form.
    """
    given = (params, batch, rng) if model_state is None else (params, batch, rng, model_state)
    _check_form(loss_fn, given)
    result = loss_fn(*given)
    if model_state is not None and not (isinstance(result, tuple) and len(result) == 3):
        raise TypeError(
            "a loss_fn with a model state must return (loss, metrics, model_state), "
            f"got {_describe_result(result)}"
        )
    return result


def _check_form(loss_fn: LossFunction, given: tuple[Any, ...]) -> None:
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # not every callable has one
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        form = "(params, batch, rng)" if len(given) == 3 else "(params, batch, rng, model_state)"
        other = (
            ", because the state has no model_state; a fourth argument needs a model that has one, "
            "or train(..., model_state=...), TrainState.create(..., model_state=...)"
            if len(given) == 3
            else ", because the state has a model_state"
        )
        raise TypeError(f"loss_fn is called as loss_fn{form}{other}: {error}") from None


def _describe_result(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__


def differentiate(
    objective: Objective,
    state: TrainState,
    batch: Batch,
    rng: jax.Array,
    parts: int,
    *,
    merge_rows: bool = True,
) -> tuple[Differentiated, Tree]:
    """Return loss, metrics, gradients and new model state of a batch in `parts` microbatches.

    Parameters that `ftrain.optimizers.groups` freezes have no gradient: None.
    """
    scale = loss_scale(state.opt_state)
    trained = without(state.params, frozen_names(state.opt_state))

    def scaled(trained: Tree, batch: Batch, rng: jax.Array, model_state: Tree):
        params = fill_in(trained, state.params)
        loss, (metrics, model_state) = objective(params, batch, rng, model_state)
        return _scale(loss, scale), (loss, metrics, model_state)

    def part(
        model_state: Tree, number: jax.Array | None, batch: Batch
    ) -> tuple[Tree, Differentiated]:
        own_rng = rng if number is None else jax.random.fold_in(rng, number)
        followed = value_and_grad(scaled, has_aux=True, merge_rows=merge_rows)
        (_, (loss, metrics, model_state)), gradients = followed(
            trained, batch, own_rng, model_state
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
