"""Replicas: programs that each have a part of the batch, and take means over all of them."""

from typing import Any

import jax
import jax.numpy as jnp

from ftrain.gradients.rows import Rows, is_rows
from ftrain.tree import Tree

Axis = str | tuple[str, ...]  # the name, or names, by which shard_map or pmap calls the replicas


def mean_over_replicas(tree: Tree, axis: Axis, weight: jax.Array | None = None) -> Tree:
    """The mean of every leaf over the replicas of an `axis` or, with a `weight` on each, over those that count.

    A replica whose weight is 0 contributes nothing, NaN or not. If none counts, the means are zero. `Rows` are gathered
    instead of summed, so that a table's size does not matter here either.
    """
    total = replicas_of(axis) if weight is None else jax.lax.psum(weight, axis)

    def mean(leaf: Any) -> Any:
        if isinstance(leaf, Rows):
            return _gather(leaf.map(lambda values: _weighed(values, weight) / _at_least_one(total, values)), axis)
        value = jnp.asarray(leaf)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        wide = value.astype(jnp.promote_types(value.dtype, jnp.float32))
        averaged = jax.lax.psum(_weighed(wide, weight), axis) / _at_least_one(total, wide)
        return averaged.astype(value.dtype) if jnp.issubdtype(value.dtype, jnp.inexact) else averaged

    return jax.tree.map(mean, tree, is_leaf=is_rows)


def replicas_of(axis: Axis) -> jax.Array | int:
    """How many replicas there are."""
    return jax.lax.psum(1, axis)


def _weighed(values: jax.Array, weight: jax.Array | None) -> jax.Array:
    return values if weight is None else jnp.where(weight > 0, values * weight.astype(values.dtype), 0)


def _at_least_one(total: jax.Array | int, like: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.asarray(total, like.dtype), 1)


def _gather(rows: Rows, axis: Axis) -> Rows:
    indices, values = (jax.lax.all_gather(part, axis, tiled=True) for part in (rows.indices, rows.values))
    return Rows(indices, values).sum_duplicates()
