"""Means over the parts of a batch: weighted means, and means over replicas."""

import dataclasses
from typing import Any, Self, TypeGuard

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ftrain.gradients.rows import Rows, is_rows
from ftrain.tree import Tree, widen

Axis = str | tuple[str, ...]  # the axis name or names of shard_map or pmap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedMean:
    """`total / weight`: a mean over unmasked tokens, for example.

    A loss function may return one as its loss, and as any metric:

        def loss_fn(params, batch, rng):
            losses = per_token_loss(params, batch)
            return WeightedMean.of(losses, batch["mask"])

    Microbatches, replicas, devices and processes then add totals and weights and divide once, so
    that the number of parts changes nothing but rounding. A plain number counts as a mean over
    examples, each with the same weight.

    >>> parts = [WeightedMean.of(jnp.array([1.0, 3.0])), WeightedMean.of(jnp.array([8.0]))]
    >>> float(parts[0].merge(parts[1]).value)
    4.0
    """

    total: ArrayLike  # the sum of weight * value
    weight: ArrayLike  # the sum of the weights; not differentiated

    @classmethod
    def of(cls, values: ArrayLike, weights: ArrayLike | None = None) -> Self:
        """Return the mean of all `values`, weighted. Weights broadcast; a mask is a weight.

        A value with weight 0 does not count, NaN or not.
        """
        values = widen(values)
        if weights is None:
            return cls(jnp.sum(values), jnp.asarray(values.size, values.dtype))
        weights = jnp.broadcast_to(jnp.asarray(weights).astype(values.dtype), values.shape)
        return cls(jnp.sum(jnp.where(weights == 0, 0, values * weights)), jnp.sum(weights))

    @property
    def value(self) -> jax.Array:
        """The mean; 0 if nothing has weight."""
        total = widen(self.total)
        weight = widen(self.weight)
        divisor = jax.lax.stop_gradient(jnp.where(weight == 0, 1, weight))
        return total / divisor.astype(total.dtype)

    def merge(self, other: "WeightedMean") -> "WeightedMean":
        """Return the mean over both."""
        return WeightedMean(
            widen(self.total) + widen(other.total), widen(self.weight) + widen(other.weight)
        )


def is_weighted(node: object) -> TypeGuard[WeightedMean]:
    """True for a `WeightedMean`; pass it as `is_leaf` to keep them whole."""
    return isinstance(node, WeightedMean)


def value_of(node: Any) -> Any:
    """Return the value of a `WeightedMean`; anything else unchanged."""
    return node.value if isinstance(node, WeightedMean) else node


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

    def mean(leaf: ArrayLike | Rows | WeightedMean) -> jax.Array | Rows | WeightedMean:
        if isinstance(leaf, WeightedMean):
            parts = (
                jax.lax.psum(_weighed(widen(part), weight), axis)
                for part in (leaf.total, leaf.weight)
            )
            return WeightedMean(*parts)
        if isinstance(leaf, Rows):
            values = _weighed(widen(leaf.values), weight)
            values /= _divisor(total, values.dtype)
            return _gather(leaf.map(lambda old: values.astype(old.dtype)), axis, merge_rows)
        value = jnp.asarray(leaf)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        averaged = jax.lax.psum(_weighed(widen(value), weight), axis)
        averaged /= _divisor(total, averaged.dtype)
        return (
            averaged.astype(value.dtype) if jnp.issubdtype(value.dtype, jnp.inexact) else averaged
        )

    return jax.tree.map(mean, tree, is_leaf=lambda node: is_rows(node) or is_weighted(node))


def replicas_of(axis: Axis) -> jax.Array | int:
    """Return the number of replicas."""
    return jax.lax.psum(1, axis)


def _weighed(values: jax.Array, weight: jax.Array | None) -> jax.Array:
    if weight is None:
        return values
    return jnp.where(weight > 0, values * weight.astype(values.dtype), 0)


def _divisor(total: jax.Array | int, dtype: DTypeLike) -> jax.Array:
    """The total weight, or 1 for means that are zero because nothing has weight."""
    return jnp.where(jnp.asarray(total) == 0, 1, total).astype(dtype)


def _gather(rows: Rows, axis: Axis, merge_rows: bool) -> Rows:
    indices = jax.lax.all_gather(rows.indices, axis, tiled=True)
    values = jax.lax.all_gather(rows.values, axis, tiled=True)
    gathered = Rows(indices, values)
    return gathered.sum_duplicates() if merge_rows else gathered
