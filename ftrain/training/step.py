"""The training step: a pure function, and its compilation for a mesh as a second, separate one."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from ftrain.averages import update_averages
from ftrain.gradients import (
    clip_by_global_norm,
    global_norm,
    loss_scale,
    skipped_updates,
    update_with_rows,
)
from ftrain.gradients.accumulation import Differentiated
from ftrain.gradients.guard import check_transform
from ftrain.gradients.means import Axis, WeightedMean, mean_over_replicas, replicas_of, value_of
from ftrain.hyperparameters import check_count, check_fraction
from ftrain.optimizers import LearningRate, apply_updates, current_learning_rate
from ftrain.optimizers.checks import check_parameters
from ftrain.optimizers.frozen import zero_frozen
from ftrain.training.loss import Batch, LossFunction, Metrics, differentiate, make_objective
from ftrain.training.state import TrainState
from ftrain.tree import Tree

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
M = TypeVar("M")
S = TypeVar("S")
CONTRIBUTES = "ftrain.contributes"  # an entry of a batch: a weight for each example, all 0 where a replica has none


def make_step(
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    clip_global_norm: float | None = None,
    accumulate: int = 1,
    averages: float | None = None,
    averages_ramp: bool = False,
    merge_rows: bool = True,
    with_model_state: bool = False,
    learning_rate: LearningRate | None = None,
    replicas: Axis | None = None,
) -> Step:
    """The pure step `(state, batch) -> (state, metrics)` that follows the gradient of `loss_fn`.

    Metrics are those of the loss function and always `loss`, `learning_rate` and `gradient_norm` (before clipping);
    with an optimizer that skips updates, such as one in a `guard`, also `update_skipped` and `updates_skipped`, and
    with `loss_scaling` the `loss_scale`. A table that is read through `ftrain.gradients.lookup` gets a gradient of the
    rows that were read, if the optimizer takes one. Parameters that the optimizer freezes, by `optax.set_to_zero()`,
    have no part in the norm.

    Args:
      loss_fn: `(params, batch, rng) -> loss` or `-> (loss, metrics)`; with `with_model_state`,
        `(params, batch, rng, model_state) -> (loss, metrics, model_state)`. The loss and each metric is a scalar, which
        counts as a mean over examples, or a `ftrain.WeightedMean`: return that for a mean over anything else, such as
        the tokens that are not masked, of which parts of a batch have different numbers.
      clip_global_norm: the length that gradients are scaled down to.
      accumulate: in how many parts the batch is differentiated, one after the other, to save memory. Each part draws
        random numbers of its own.
      averages: the decay of moving averages of the parameters, a -= (1 - decay) * (a - p); create the state with
        `averages=True`, or with a pattern for some of them. Those of a table cost time for all of its rows.
      averages_ramp: use the smaller of `averages` and (1 + n) / (10 + n) as the decay of step n, so that averages leave
        the initial parameters quickly: `num_updates` of TensorFlow 1's ExponentialMovingAverage.
      merge_rows: whether rows of a table that a batch reads twice are summed before their norm is taken, as in the
        gradient of the whole table. False takes the norm of what was read, as TensorFlow 1 does for IndexedSlices.
      replicas: the axis over which replicas of this step, each with its part of the batch, take their means, for
        `shard_map` and `pmap`. The model state should be means over examples. Random numbers are its own in each.
        Examples that an entry CONTRIBUTES of the batch gives a weight of 0 leave their replica out.
      learning_rate: shown in the metrics for an optimizer whose state does not tell its rate, as plain optax ones;
        without it they show NaN.
    """
    if clip_global_norm is not None and not clip_global_norm > 0:  # infinity clips nothing
        raise ValueError(f"clip_global_norm must be > 0, got {clip_global_norm}")
    check_fraction(averages=averages)
    check_count(accumulate=accumulate)
    check_transform(optimizer)
    objective = make_objective(loss_fn, with_model_state)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_parameters(state.params)
        rng = _rng_of(state, replicas)
        batch, weight = _split_weight(batch, replicas)
        found, model_state = differentiate(
            objective, state, batch, rng, accumulate, merge_rows=merge_rows
        )
        contributions = {}
        if replicas is not None:
            found, model_state = _mean_of_all(found, model_state, replicas, weight, merge_rows)
            contributions["contributions"] = (
                replicas_of(replicas) if weight is None else jax.lax.psum(weight, replicas)
            )
        loss = value_of(found.value)
        metrics = {name: value_of(metric) for name, metric in found.auxiliary.items()}
        if weight is not None:  # what nobody contributed to stays
            is_any = contributions["contributions"] > 0
            model_state = jax.tree.map(
                lambda new, old: jnp.where(is_any, new, old), model_state, state.model_state
            )
        extra = {"value": loss, **contributions}
        gradients = zero_frozen(
            found.gradients,
            optimizer,
            state.opt_state,
            state.params,
            value_fn=lambda params: loss,
            **extra,
        )
        norm = global_norm(gradients)
        if clip_global_norm is not None:
            gradients, _ = clip_by_global_norm(gradients, clip_global_norm, use_norm=norm)
        updates, opt_state = (
            update_with_rows(  # some optimizers look at the loss, or search along a line
                optimizer,
                gradients,
                state.opt_state,
                state.params,
                value_fn=lambda params: _mean(
                    objective(params, batch, rng, state.model_state)[0], replicas, weight
                ),
                **extra,
            )
        )
        params = apply_updates(state.params, updates)
        skips = _shown_skips(state.opt_state, opt_state)
        if "update_skipped" in skips:  # what spoiled the gradients has spoiled the statistics too
            model_state = jax.lax.cond(
                skips["update_skipped"] > 0,
                lambda: state.model_state,
                lambda model_state=model_state: model_state,
            )
        new_state = state.replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            averages=_average(state, params, averages, averages_ramp),
            model_state=model_state,
        )
        rate = _shown_rate(opt_state, learning_rate, state.step)
        own = {"loss": loss, "learning_rate": rate, "gradient_norm": norm, **skips}
        if weight is not None:
            own["replicas"] = contributions["contributions"]
        return new_state, {
            **own,
            **metrics,
            **own,
        }  # ours come first, and a metric of the same name gives way

    def gradients_of(state: TrainState, batch: Batch) -> tuple[jax.Array, Metrics, Tree, Tree]:
        batch, _ = _split_weight(batch, replicas)
        found, model_state = differentiate(
            objective, state, batch, _rng_of(state, replicas), accumulate
        )
        metrics = {name: value_of(metric) for name, metric in found.auxiliary.items()}
        return value_of(found.value), metrics, model_state, found.gradients

    step.differentiate = gradients_of  # pyright: ignore[reportFunctionMemberAccess] - `locate` reads it to find a NaN
    return step


def _rng_of(state: TrainState, replicas: Axis | None) -> jax.Array:
    """The random numbers of a step, and in it of each replica."""
    rng = jax.random.fold_in(state.rng, state.step)
    return rng if replicas is None else jax.random.fold_in(rng, jax.lax.axis_index(replicas))


def _split_weight(batch: Batch, replicas: Axis | None) -> tuple[Batch, jax.Array | None]:
    """The batch without its weights, and the weight of this replica, if there is one."""
    if replicas is None or not isinstance(batch, Mapping) or CONTRIBUTES not in batch:
        return batch, None
    rest = {name: leaf for name, leaf in batch.items() if name != CONTRIBUTES}
    return rest, jnp.min(batch[CONTRIBUTES]).astype(jnp.float32)


def _mean_of_all(
    found: Differentiated,
    model_state: Tree,
    replicas: Axis,
    weight: jax.Array | None,
    merge_rows: bool,
) -> tuple[Differentiated, Tree]:
    """Loss, metrics, gradients and model state of all replicas; what is counted in the state is the same in each."""
    value, auxiliary, means = mean_over_replicas(
        (found.value, found.auxiliary, model_state), replicas, weight
    )
    share = weight
    if isinstance(found.value, WeightedMean):
        share = jnp.asarray(found.value.weight, jnp.float32) * (1 if weight is None else weight)
    gradients = mean_over_replicas(found.gradients, replicas, share, merge_rows=merge_rows)
    kept = jax.tree.map(
        lambda own, mean: mean if mean.dtype == own.dtype else own, model_state, means
    )
    return Differentiated(value, auxiliary, gradients), kept


def _mean(
    loss: jax.Array | WeightedMean, replicas: Axis | None, weight: jax.Array | None
) -> jax.Array:
    return value_of(loss if replicas is None else mean_over_replicas(loss, replicas, weight))


def _average(state: TrainState, params: Tree, decay: float | None, ramp: bool) -> Tree | None:
    if decay is None:
        return state.averages
    if state.averages is None:
        raise ValueError(
            "this step keeps averages: create its state with TrainState.create(..., averages=True)"
        )
    return update_averages(state.averages, params, decay, state.step + 1 if ramp else None)


def _shown_skips(before: Tree, after: Tree) -> Metrics:
    """What transforms that skip updates tell of this one."""
    scale, earlier, now = loss_scale(after), skipped_updates(before), skipped_updates(after)
    shown = {} if scale is None else {"loss_scale": scale}
    if earlier is not None and now is not None:
        shown |= {"update_skipped": now - earlier, "updates_skipped": now}
    return shown


def _shown_rate(opt_state: Tree, learning_rate: LearningRate | None, step: jax.Array) -> jax.Array:
    """The rate that the optimizer's state tells, or else the one given, or else NaN for not known."""
    told = current_learning_rate(opt_state)
    if told is not None:
        return told
    value = learning_rate(step) if callable(learning_rate) else learning_rate
    return jnp.asarray(jnp.nan if value is None else value, jnp.float32)
