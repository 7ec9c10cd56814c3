"""Synchronous replicas: apply the mean gradient of several arrivals as one update."""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ftrain.averages import update_averages
from ftrain.gradients.guard import check_transform, update_if
from ftrain.gradients.rows import is_rows
from ftrain.gradients.rows_fallback import RowsNotSupportedError
from ftrain.hyperparameters import check_count, check_fraction
from ftrain.optimizers.checks import leaves_of_gradients
from ftrain.optimizers.frozen import without
from ftrain.optimizers.parameter_group import frozen_names
from ftrain.optimizers.rule import apply_updates
from ftrain.schedules import Schedule, value_at
from ftrain.tree import Tree, leaves_with_names, nodes_of, wide_dtype


class Arrivals(NamedTuple):
    """The gradients that arrived, counted in replicas."""

    waiting: jax.Array  # arrived since the newest update
    aggregated: jax.Array  # averaged by the newest update
    updates: jax.Array  # applied so far; a replica's local step when it reads the parameters
    dropped: jax.Array  # stale, so far


class SyncReplicasState(NamedTuple):
    """The state of `sync_replicas`."""

    inner: Tree  # the state of the wrapped optimizer
    arrivals: Arrivals
    sums: Tree | None  # of waiting gradients, in float32 or wider; None if one replica is enough
    averages: Tree | None  # moving averages of the parameters, in float32 or wider


class RowsSumError(RowsNotSupportedError, TypeError):
    """`sync_replicas` was given `Rows` to sum over several arrivals."""


def sync_replicas(
    optimizer: optax.GradientTransformation,
    replicas_to_aggregate: int,
    total_num_replicas: int | None = None,
    *,
    averages: float | Schedule | None = None,
    averages_ramp: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `optimizer`: apply it to the mean gradient of `replicas_to_aggregate` replicas.

        optimizer.update(gradients, state, params, contributions=1, local_step=None)

    is one arrival: the mean gradient of `contributions` replicas, computed from parameters after
    `local_step` updates; None means the newest. If an update was applied since, the arrival is
    stale: it is dropped and counted. Until enough have arrived, updates are zero and `optimizer`
    keeps its state. Then the mean over all arrivals is applied, and the next round begins. An
    arrival with 0 contributions is ignored, NaN or not. A gradient that is enough by itself reaches
    `optimizer` unchanged, bit for bit.

    With fewer to aggregate than there are replicas, the slowest of each round are backups, and
    their gradients are stale. With more, replicas contribute several batches to an update.

    `optimizer` counts updates, not arrivals, and so does its schedule. Other arguments of `update`,
    such as the `value` that some optimizers use, are those of the newest arrival. A leaf whose
    gradient is None must have none in any arrival of a round. `Rows` are supported if one replica
    is enough. Otherwise they are refused: a sum of rows has no fixed size, and a dense gradient
    would move rows that no replica read. To accept that, put `ftrain.gradients.densify()` before.

    Args:
      total_num_replicas: the number of replicas, by default `replicas_to_aggregate`. It only
        limits the contributions of one arrival, to the larger of the two.
      averages: the decay of moving averages of the parameters, or a schedule of it, as in
        `ftrain.averages.update_averages`. `averaged_params` reads them. No transform after this one
        may change the updates.
      averages_ramp: use a smaller decay for the first updates, as with `num_updates` there.
    """
    check_transform(optimizer)
    check_count(replicas_to_aggregate=replicas_to_aggregate)
    needed = operator.index(replicas_to_aggregate)
    total = needed
    if total_num_replicas is not None:
        check_count(total_num_replicas=total_num_replicas)
        total = operator.index(total_num_replicas)
    if averages is not None:
        check_fraction(averages=averages)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> SyncReplicasState:
        inner_state = inner.init(params)
        summed = without(params, frozen_names(inner_state))
        return SyncReplicasState(
            inner=inner_state,
            arrivals=Arrivals(*(jnp.zeros((), jnp.int32) for _ in Arrivals._fields)),
            sums=None
            if needed == 1
            else jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=wide_dtype(leaf)), summed),
            averages=None
            if averages is None
            else jax.tree.map(lambda leaf: jnp.array(leaf, wide_dtype(leaf)), params),
        )

    def update(
        gradients: Tree,
        state: SyncReplicasState,
        params: Tree | None = None,
        *,
        contributions: float | jax.Array = 1,
        local_step: int | jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Tree, SyncReplicasState]:
        _check_call(state, params, needed > 1, averages is not None)
        before = state.arrivals
        gradients = without(gradients, frozen_names(state.inner))
        offered = _contributions(contributions, max(needed, total))
        counted = (
            offered
            if local_step is None
            else jnp.where(_step(local_step) >= before.updates, offered, 0)
        )
        arrived = before.waiting + counted
        is_enough = arrived >= needed
        sums = state.sums
        if needed > 1:
            add = functools.partial(_add, counted=counted, waiting=before.waiting)
            sums = jax.lax.cond(
                is_enough | (counted == 0),
                lambda sums, _: sums,
                add,
                sums,
                _arrays(gradients, sums),
            )

        def apply(gradients: Tree, kept: tuple[Tree, ...], params: Tree | None, **extra: Any):
            inner_state, sums, means = kept
            if needed > 1:
                gradients = _mean(sums, gradients, counted, before.waiting)
                sums = jax.tree.map(jnp.zeros_like, sums)
            updates, inner_state = inner.update(gradients, inner_state, params, **extra)
            if averages is not None:
                count = before.updates + 1 if averages_ramp else None
                decay = value_at(averages, before.updates, jnp.float32)
                means = update_averages(means, apply_updates(params, updates), decay, count)
            return updates, (inner_state, sums, means)

        rounds = optax.GradientTransformationExtraArgs(
            inner.init,
            apply,  # pyright: ignore[reportArgumentType] - optax's type is for any state
        )
        kept = (state.inner, sums, state.averages)
        updates, (inner_state, sums, means) = update_if(
            is_enough, rounds, gradients, kept, params, **extra
        )
        after = Arrivals(
            waiting=jnp.where(is_enough, 0, arrived),
            aggregated=jnp.where(is_enough, arrived, before.aggregated),
            updates=before.updates + is_enough.astype(jnp.int32),
            dropped=before.dropped + offered - counted,
        )
        return updates, SyncReplicasState(inner_state, after, sums, means)

    return optax.GradientTransformationExtraArgs(
        init,  # pyright: ignore[reportArgumentType] - optax's type has no None in a state
        update,  # pyright: ignore[reportArgumentType] - optax's type is for any state
    )


def arrivals(opt_state: Tree) -> Arrivals | None:
    """Return the counts of arrived gradients; None without `sync_replicas`."""
    found = nodes_of(opt_state, Arrivals)
    return found[0] if found else None


def averaged_params(opt_state: Tree) -> Tree | None:
    """Return the averaged parameters; None without `sync_replicas(..., averages=decay)`."""
    found = nodes_of(opt_state, SyncReplicasState)
    return found[0].averages if found else None


def _add(sums: Tree, given: list[jax.Array | None], counted: jax.Array, waiting: jax.Array) -> Tree:
    """Add gradients, weighted by the replicas `counted`, to the sums of waiting ones."""

    def add(total: jax.Array, gradient: jax.Array | None) -> jax.Array:
        if gradient is None:
            return total
        weighed = jnp.where(
            counted > 0, gradient.astype(total.dtype) * counted.astype(total.dtype), 0
        )
        # Adding to zero would lose the sign of -0.
        return jnp.where(waiting == 0, weighed, total + weighed)

    totals, structure = jax.tree.flatten(sums)
    return structure.unflatten(map(add, totals, given))


def _mean(sums: Tree, gradients: Tree, counted: jax.Array, waiting: jax.Array) -> Tree:
    """Return the mean of waiting and new gradients; the new ones unchanged if none are waiting.

    By a conditional: XLA might fuse a selection with the optimizer, and round it differently.
    """

    def divide(total: jax.Array, gradient: jax.Array | None) -> jax.Array | None:
        if gradient is None:
            return None
        return (total / (waiting + counted).astype(total.dtype)).astype(gradient.dtype)

    def mean(given: list[jax.Array | None], sums: Tree) -> list[jax.Array | None]:
        return list(map(divide, jax.tree.leaves(_add(sums, given, counted, waiting)), given))

    given = jax.lax.cond(waiting == 0, lambda given, _: given, mean, _arrays(gradients, sums), sums)
    return jax.tree.structure(sums).unflatten(given)


def _arrays(gradients: Tree, sums: Tree) -> list[jax.Array | None]:
    """Return the gradients as arrays; raise RowsSumError for `Rows`."""
    given = leaves_of_gradients(gradients, sums)
    for (name, _), gradient in zip(leaves_with_names(sums), given, strict=True):
        if is_rows(gradient):
            raise RowsSumError(
                f"the gradient of {name} is Rows, which sync_replicas cannot sum over several "
                "arrivals: put ftrain.gradients.densify() before it, or aggregate 1 replica"
            )
    return [None if gradient is None else jnp.asarray(gradient) for gradient in given]


def _contributions(value: ArrayLike, most: int) -> jax.Array:
    """Check a number of replicas; round one known only to the device to an integer >= 0."""
    if not _is_count(value, most):
        raise ValueError(
            f"contributions must be a whole number of replicas from 0 to {most}, got {value}"
        )
    count = _scalar("contributions", value)
    return jnp.where(count > 0, jnp.round(count), 0).astype(jnp.int32)  # NaN is not > 0


def _step(value: ArrayLike) -> jax.Array:
    if not _is_count(value):
        raise ValueError(
            f"local_step must be a whole number of updates, or None for the newest, got {value}"
        )
    return _scalar("local_step", value)


def _is_count(value: ArrayLike, most: float = math.inf) -> bool:
    """True for a count, and for any array: it may have no value yet, and reading it would block."""
    return not isinstance(value, (int, float, np.number)) or (
        0 <= float(value) <= most and float(value).is_integer()
    )


def _scalar(name: str, value: ArrayLike) -> jax.Array:
    if jnp.shape(value) != ():
        raise ValueError(f"{name} must be one number, got an array of shape {jnp.shape(value)}")
    number = jnp.asarray(value)
    return number.astype(jnp.int32) if number.dtype == bool else number


def _check_call(state: object, params: Tree | None, has_sums: bool, has_averages: bool) -> None:
    if not isinstance(state, SyncReplicasState):
        raise ValueError(
            f"the state must be a SyncReplicasState, got {type(state).__name__}; "
            "init(params) makes a new one"
        )
    if (state.sums is not None, state.averages is not None) != (has_sums, has_averages):
        raise ValueError(
            f"the state has {_describe(state.sums is not None, state.averages is not None)}, "
            f"expected {_describe(has_sums, has_averages)}: it was made with other arguments of "
            "sync_replicas; init(params) makes a new one"
        )
    if has_averages and params is None:
        raise ValueError("averages need the parameters: call update(gradients, state, params)")


def _describe(has_sums: bool, has_averages: bool) -> str:
    return (
        f"{'sums' if has_sums else 'no sums'} and {'averages' if has_averages else 'no averages'}"
    )
