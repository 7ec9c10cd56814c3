"""Accumulation: the gradient of a large batch, computed in microbatches with the memory of one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ftrain.gradients.means import WeightedMean, is_weighted
from ftrain.gradients.rows import Rows, is_rows, map_values
from ftrain.hyperparameters import check_count
from ftrain.tree import Tree, named_leaves, wide_dtype, widen

Summand = jax.Array | Rows | WeightedMean  # what is summed over the microbatches


class Differentiated(NamedTuple):
    """The result of differentiating a loss. Value and auxiliary are scalars or `WeightedMean`s."""

    value: Any
    auxiliary: Tree
    gradients: Tree  # of the value, with its weight


# (carry, number of the microbatch, microbatch) -> (carry, result for the microbatch)
Part = Callable[[Tree, jax.Array, Tree], tuple[Tree, Differentiated]]


def accumulate(
    differentiate: Callable[..., tuple[Tree, Tree]], microbatches: int
) -> Callable[..., tuple[Tree, Tree]]:
    """Compute what `differentiate` returns for a batch in at most `microbatches` parts.

    `differentiate(params, batch, ...)`, such as a `value_and_grad`, is called with parts of
    `batch`, whose leaves have a first axis of examples. Values and gradients are averaged. A plain
    value is a mean over the examples of its part; the last part may have fewer. A `WeightedMean`
    has its own weight, and the gradients have it too.

        value, gradients = accumulate(value_and_grad(loss), 16)(params, batch)
    """
    check_count(microbatches=microbatches)

    def accumulated(params: Tree, batch: Tree, *args: Any, **kwargs: Any) -> tuple[Tree, Tree]:
        has_auxiliary = False

        def part(carry: Tree, number: jax.Array, microbatch: Tree) -> tuple[Tree, Differentiated]:
            nonlocal has_auxiliary
            del number
            value, gradients = differentiate(params, microbatch, *args, **kwargs)
            _check_scalars(value)
            has_auxiliary = isinstance(value, tuple) and len(value) == 2
            value, auxiliary = value if has_auxiliary else (value, None)
            return carry, Differentiated(value, auxiliary, gradients)

        _, found = average(part, (), batch, microbatches)
        result = (found.value, found.auxiliary) if has_auxiliary else found.value
        return result, found.gradients

    return accumulated


def _check_scalars(value: Tree) -> None:
    for name, leaf in named_leaves(value).items():
        if jnp.ndim(leaf) != 0:
            raise ValueError(
                f"values are averaged over the parts, so they must be scalars; {name} has shape "
                f"{jnp.shape(leaf)}: take its mean"
            )


def average(
    part: Part, carry: Tree, batch: Tree, microbatches: int, *, merge_rows: bool = True
) -> tuple[Tree, Differentiated]:
    """Return the last carry, and the mean of the results of `part` over the microbatches.

    Sums are kept in float32 or wider; means have the dtype of what is averaged. `Rows` are
    concatenated, not summed, so that the cost does not depend on the table's size. Without
    `merge_rows`, a row that several parts list stays listed several times.
    """
    parts = _Parts(batch, microbatches)
    shapes = jax.eval_shape(lambda: part(carry, jnp.int32(0), parts.take(jnp.int32(0)))[1])
    likes, structure = jax.tree.flatten(shapes, is_leaf=_is_whole)

    def weigh(
        carry: Tree, number: jax.Array, microbatch: Tree, share: float
    ) -> tuple[Tree, list[Any]]:
        carry, found = part(carry, number, microbatch)
        return carry, jax.tree.leaves(_weighed(found, share), is_leaf=_is_whole)

    def add(carried: tuple[Tree, list[Any]], number: jax.Array):
        carry, found = weigh(carried[0], number, parts.take(number), parts.size / parts.examples)
        sums = [
            None if total is None else _sum(total, leaf)
            for total, leaf in zip(carried[1], found, strict=True)
        ]
        return (carry, sums), [leaf if is_rows(leaf) else None for leaf in found]

    zeros = [
        None
        if is_rows(like)
        else jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide_dtype(leaf)), like)
        for like in likes
    ]
    (carry, sums), stacked = jax.lax.scan(add, (carry, zeros), jnp.arange(parts.whole))
    totals: list[Any] = [
        total if rows is None else _flatten(rows) for total, rows in zip(sums, stacked, strict=True)
    ]
    if parts.rest:
        carry, found = weigh(
            carry, jnp.int32(parts.whole), parts.tail(), parts.rest / parts.examples
        )
        totals = [_sum(total, leaf) for total, leaf in zip(totals, found, strict=True)]
    found = structure.unflatten(totals)
    if isinstance(found.value, WeightedMean):
        weight = jnp.where(found.value.weight == 0, 1, found.value.weight)
        found = found._replace(gradients=map_values(lambda total: total / weight, found.gradients))
    settled = zip(jax.tree.leaves(found, is_leaf=_is_whole), likes, strict=True)
    return carry, structure.unflatten([_settle(total, like, merge_rows) for total, like in settled])


def _weighed(found: Differentiated, share: float) -> Differentiated:
    """What a part adds to the sums: values and gradients times its `share`, or their own weight."""

    def shared(leaf: jax.Array | WeightedMean) -> jax.Array | WeightedMean:
        if isinstance(leaf, WeightedMean):
            return jax.tree.map(widen, leaf)
        return widen(leaf) * share

    def weighed(values: jax.Array) -> jax.Array:
        if not isinstance(found.value, WeightedMean):
            return widen(values) * share
        weight = widen(found.value.weight)
        return jnp.where(weight == 0, 0, widen(values) * weight)

    auxiliary = jax.tree.map(shared, found.auxiliary, is_leaf=is_weighted)
    return Differentiated(shared(found.value), auxiliary, map_values(weighed, found.gradients))


class _Parts:
    """A batch in microbatches of one size, and a shorter one for the remaining examples.

    Each takes every n-th example. If examples are sharded over devices, every device has some of
    each.
    """

    def __init__(self, batch: Tree, microbatches: int):
        self._batch = jax.tree.map(jnp.asarray, batch)
        self.examples = _count_examples(self._batch)
        self.size = -(-self.examples // microbatches)
        self.whole, self.rest = divmod(self.examples, self.size)

    def take(self, number: jax.Array) -> Tree:
        """Return one of the microbatches of full size."""

        def take(leaf: jax.Array) -> jax.Array:
            divided = leaf[: self.whole * self.size].reshape(self.size, self.whole, *leaf.shape[1:])
            return jax.lax.dynamic_index_in_dim(divided, number, 1, keepdims=False)

        return jax.tree.map(take, self._batch)

    def tail(self) -> Tree:
        """Return the shorter microbatch."""
        return jax.tree.map(lambda leaf: leaf[self.whole * self.size :], self._batch)


def _count_examples(batch: Tree) -> int:
    counts = {
        name: leaf.shape[0] if jnp.ndim(leaf) else 0 for name, leaf in named_leaves(batch).items()
    }
    if len(set(counts.values())) != 1 or 0 in counts.values():
        found = ", ".join(f"{name} {count or 'none'}" for name, count in counts.items())
        raise ValueError(
            "all leaves of a batch must have the same number of examples, "
            f"got {found or 'no leaves'}"
        )
    return next(iter(counts.values()))


def _is_whole(node: object) -> bool:
    """True for `Rows` and `WeightedMean`s, which are summed as a whole."""
    return is_rows(node) or is_weighted(node)


def _flatten(stacked: Rows) -> Rows:
    """Concatenate the `Rows` of several parts, stacked by a scan."""
    return Rows(stacked.indices.reshape(-1), stacked.values.reshape(-1, *stacked.values.shape[2:]))


def _sum(total: Summand, more: Any) -> Summand:
    """Add a part to the sum; `Rows` are concatenated."""
    if isinstance(total, Rows):
        indices = jnp.concatenate([total.indices, more.indices])
        return Rows(indices, jnp.concatenate([total.values, more.values]))
    return total.merge(more) if isinstance(total, WeightedMean) else total + more


def _settle(total: Summand, like: Any, merge_rows: bool) -> Summand:
    """Convert a mean to the dtype of what was averaged; means of integers stay floating point."""
    if isinstance(total, Rows):
        merged = total.sum_duplicates() if merge_rows else total
        return merged.map(lambda values: values.astype(like.values.dtype))
    if isinstance(total, WeightedMean):
        return total
    return total.astype(like.dtype) if jnp.issubdtype(like.dtype, jnp.inexact) else total
