"""Accumulation: the gradient of a large batch from small parts of it, one after the other, in the memory of one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ftrain.gradients.rows import Rows, is_rows, map_values
from ftrain.tree import Tree, named_leaves

# (carry, number of the microbatch, microbatch) -> (carry, a tree of means over the microbatch's examples)
Part = Callable[[Tree, jax.Array, Tree], tuple[Tree, Tree]]


def accumulate(differentiate: Callable[..., tuple[Any, Tree]], microbatches: int) -> Callable[..., tuple[Any, Tree]]:
    """What `value_and_grad` of a mean over a batch answers, computed in at most `microbatches` parts.

    `differentiate(params, batch, ...)` is called with parts of `batch`, whose leaves have a first axis of examples. The
    value, what comes with it and the gradients are averaged, weighted by the examples of each part, of which the last
    one may have fewer.

        value, gradients = accumulate(value_and_grad(loss), 16)(params, batch)
    """
    if microbatches < 1:
        raise ValueError(f"microbatches must be >= 1, got {microbatches}")

    def accumulated(params: Tree, batch: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
        def part(carry: Tree, number: jax.Array, microbatch: Tree) -> tuple[Tree, Any]:
            del number
            answer = differentiate(params, microbatch, *args, **kwargs)
            _check_scalars(answer[0])
            return carry, answer

        return average(part, (), batch, microbatches)[1]

    return accumulated


def _check_scalars(value: Tree) -> None:
    for name, leaf in named_leaves(value).items():
        if jnp.ndim(leaf) != 0:
            raise ValueError(
                f"what comes with the value is averaged over the parts, so it must be scalars; {name} has shape "
                f"{jnp.shape(leaf)}: take its mean"
            )


def average(part: Part, carry: Tree, batch: Tree, microbatches: int) -> tuple[Tree, Tree]:
    """The last carry, and the mean of what `part` answers, over the microbatches of a batch in turn.

    Sums are kept in float32 at least, and means have the dtype of what is averaged. `Rows` are not summed over
    parts but kept together, so that a table's size does not matter here either.
    """
    parts = _Parts(batch, microbatches)
    shapes = jax.eval_shape(lambda: part(carry, jnp.int32(0), parts.take(jnp.int32(0)))[1])
    likes, structure = jax.tree.flatten(shapes, is_leaf=is_rows)

    def weigh(carry: Tree, number: jax.Array, microbatch: Tree, share: float) -> tuple[Tree, list[Any]]:
        carry, answer = part(carry, number, microbatch)
        weighed = map_values(lambda values: jnp.asarray(values, _wide(values)) * share, answer)
        return carry, jax.tree.leaves(weighed, is_leaf=is_rows)

    def add(carried: tuple[Tree, list[Any]], number: jax.Array):
        carry, answer = weigh(carried[0], number, parts.take(number), parts.size / parts.examples)
        sums = [None if total is None else total + leaf for total, leaf in zip(carried[1], answer, strict=True)]
        return (carry, sums), [leaf if is_rows(leaf) else None for leaf in answer]

    zeros = [None if is_rows(like) else jnp.zeros(like.shape, _wide(like)) for like in likes]
    (carry, sums), stacked = jax.lax.scan(add, (carry, zeros), jnp.arange(parts.whole))
    totals = [total if rows is None else _flatten(rows) for total, rows in zip(sums, stacked, strict=True)]
    if parts.rest:
        carry, answer = weigh(carry, jnp.int32(parts.whole), parts.tail(), parts.rest / parts.examples)
        totals = [_join(total, leaf) for total, leaf in zip(totals, answer, strict=True)]
    return carry, structure.unflatten([_settle(total, like) for total, like in zip(totals, likes, strict=True)])


class _Parts:
    """A batch in microbatches of one size, and a shorter one if examples are left over.

    Each takes every n-th example. Where examples are spread over devices, every device has some of each microbatch.
    """

    def __init__(self, batch: Tree, microbatches: int):
        self._batch = jax.tree.map(jnp.asarray, batch)
        self.examples = _count_examples(self._batch)
        self.size = -(-self.examples // microbatches)
        self.whole, self.rest = divmod(self.examples, self.size)

    def take(self, number: jax.Array) -> Tree:
        """One of the microbatches of full size."""

        def take(leaf: jax.Array) -> jax.Array:
            divided = leaf[: self.whole * self.size].reshape(self.size, self.whole, *leaf.shape[1:])
            return jax.lax.dynamic_index_in_dim(divided, number, 1, keepdims=False)

        return jax.tree.map(take, self._batch)

    def tail(self) -> Tree:
        """The shorter one."""
        return jax.tree.map(lambda leaf: leaf[self.whole * self.size :], self._batch)


def _count_examples(batch: Tree) -> int:
    counts = {name: leaf.shape[0] if jnp.ndim(leaf) else 0 for name, leaf in named_leaves(batch).items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        found = ", ".join(f"{name} {count or 'none'}" for name, count in counts.items())
        raise ValueError(f"the leaves of a batch need one and the same number of examples, got {found or 'no leaves'}")
    return next(iter(counts.values()))


def _wide(values: Any) -> Any:
    return jnp.promote_types(jnp.result_type(values), jnp.float32)


def _flatten(stacked: Rows) -> Rows:
    """`Rows` of several parts, stacked by a scan, as one."""
    return Rows(stacked.indices.reshape(-1), stacked.values.reshape(-1, *stacked.values.shape[2:]))


def _join(total: Any, more: Any) -> Any:
    if not isinstance(total, Rows):
        return total + more
    indices = jnp.concatenate([total.indices, more.indices])
    return Rows(indices, jnp.concatenate([total.values, more.values]))


def _settle(total: Any, like: Any) -> Any:
    """A mean in the dtype of what was averaged; of whole numbers it is not a whole one."""
    if isinstance(total, Rows):
        return total.sum_duplicates().map(lambda values: values.astype(like.values.dtype))
    return total.astype(like.dtype) if jnp.issubdtype(like.dtype, jnp.inexact) else total
