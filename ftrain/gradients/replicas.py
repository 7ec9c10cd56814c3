"""Replicas: means over programs that each have a part of the batch."""

from typing import Any

import jax
import jax.numpy as jnp

from ftrain.gradients.rows import Rows, is_rows
from ftrain.tree import Tree
from ftrain.weighted_mean import WeightedMean, is_weighted

Axis = str | tuple[str, ...]  # the axis name or names of shard_map or pmap


def mean_over_replicas(
    tree: Tree, axis: Axis, weight: jax.Array | None = None, *, merge_rows: bool = True
) -> Tree:
    """Return the mean of every leaf over the replicas of an `axis`, weighted by `weight`.

    A replica whose weight is 0 contributes nothing, NaN or not. If all weights are 0, the means are
    zero. A `WeightedMean` is merged with those of the other replicas. `Rows` are gathered, not
    summed, so that the cost does not depend on the table's size; without `merge_rows`, a row that
    several replicas list stays listed several times.
    """
    total = replicas_of(axis) if weight is None else jax.lax.psum(weight, axis)

    def mean(leaf: Any) -> Any:
        if isinstance(leaf, WeightedMean):
            parts = (
                jax.lax.psum(_weighed(_widen(part), weight), axis)
                for part in (leaf.total, leaf.weight)
            )
            return WeightedMean(*parts)
        if isinstance(leaf, Rows):
            values = _weighed(_widen(leaf.values), weight) / _divisor(total)
            return _gather(leaf.map(lambda old: values.astype(old.dtype)), axis, merge_rows)
        value = jnp.asarray(leaf)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        averaged = jax.lax.psum(_weighed(_widen(value), weight), axis) / _divisor(total)
        return (
            averaged.astype(value.dtype) if jnp.issubdtype(value.dtype, jnp.inexact) else averaged
        )

    return jax.tree.map(mean, tree, is_leaf=lambda node: is_rows(node) or is_weighted(node))


def replicas_of(axis: Axis) -> jax.Array | int:
    """Return the number of replicas."""
    return jax.lax.psum(1, axis)


def _weighed(values: jax.Array, weight: jax.Array | None) -> jax.Array:
    return (
        values if weight is None else jnp.where(weight > 0, values * weight.astype(values.dtype), 0)
    )


def _widen(values: Any) -> jax.Array:
    array = jnp.asarray(values)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _divisor(total: jax.Array | int) -> jax.Array:
    return jnp.where(jnp.asarray(total) == 0, 1, total)


def _gather(rows: Rows, axis: Axis, merge_rows: bool) -> Rows:
    indices = jax.lax.all_gather(rows.indices, axis, tiled=True)
    values = jax.lax.all_gather(rows.values, axis, tiled=True)
    gathered = Rows(indices, values)
    return gathered.sum_duplicates() if merge_rows else gathered
