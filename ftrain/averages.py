"""Exponential moving averages of parameters, which often evaluate better than the parameters."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ftrain.tree import Tree, leaves_with_names, matching_names, named_leaves, wide_dtype

Number = float | jax.Array


def update_averages(
    averages: Tree, values: Tree, decay: Number, num_updates: Number | None = None
) -> Tree:
    """averages -= (1 - d) * (averages - values), with d = decay.

    With n = num_updates, d = min(decay, (1 + n) / (10 + n)): a smaller decay at first makes the
    averages forget their start quickly.

    A leaf whose average is None is not averaged. Averages in bfloat16 or float16 are rounded at
    every update, so one with a long memory stops moving: keep them in float32, whatever dtype the
    values have.
    """
    fresh = 1 - _decay_now(decay, num_updates)

    def move(mean: jax.Array | None, new: jax.Array) -> jax.Array | None:
        if mean is None:
            return None
        wide = wide_dtype(mean)  # in fewer bits, 1 - decay is not accurate
        moved = mean.astype(wide) - fresh.astype(wide) * (
            mean.astype(wide) - jnp.asarray(new, wide)
        )
        return moved.astype(mean.dtype)

    return jax.tree.map(move, averages, values, is_leaf=lambda node: node is None)


def start_averages(values: Tree, only: str | Sequence[str] = ()) -> Tree:
    """Return averages before their first update: a copy of the values, in float32 or wider.

    If `only` lists regular expressions, leaves whose names match none of them are not averaged:
    their averages are None.
    """
    patterns = (only,) if isinstance(only, str) else tuple(only)
    chosen = matching_names(values, patterns, "averages") if patterns else {*named_leaves(values)}
    copies = [
        jnp.array(leaf, dtype=wide_dtype(leaf)) if name in chosen else None
        for name, leaf in leaves_with_names(values)
    ]
    return jax.tree.structure(values).unflatten(copies)


def averaged(averages: Tree, values: Tree) -> Tree:
    """Return `values` with leaves replaced by their averages, in the dtypes of `values`."""

    def choose(mean: jax.Array | None, own: jax.Array) -> jax.Array:
        return own if mean is None else mean.astype(own.dtype)

    return jax.tree.map(choose, averages, values, is_leaf=lambda node: node is None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ZeroDebiased:
    """Averages that start at zero, with the bias towards zero corrected.

    b -= (1 - d) * (b - values), and the average is b / (1 - d**t) after t updates, with d as in
    `update_averages`.

        averages = ZeroDebiased.create(like=values)
        averages = averages.update(values, 0.99)
        averages.values
    """

    values: Tree  # the averages
    biased: Tree
    count: jax.Array  # updates so far

    @classmethod
    def create(cls, like: Tree) -> "ZeroDebiased":
        """Return averages of zero, in the shapes of `like` and in float32 or wider."""

        def zeros() -> Tree:
            return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=wide_dtype(leaf)), like)

        return cls(zeros(), zeros(), jnp.zeros((), jnp.int32))

    def update(
        self, values: Tree, decay: Number, num_updates: Number | None = None
    ) -> "ZeroDebiased":
        """Return the averages after one more update."""
        biased = update_averages(self.biased, values, decay, num_updates)
        count = self.count + 1
        fresh = 1 - _decay_now(decay, num_updates)

        def correct(mean: jax.Array) -> jax.Array:
            wide = wide_dtype(mean)  # in fewer bits, 1 - d**t may be zero
            share = 1 - (1 - fresh.astype(wide)) ** count.astype(wide)
            return (mean.astype(wide) / share).astype(mean.dtype)

        return ZeroDebiased(jax.tree.map(correct, biased), biased, count)


def average_names(params: Tree) -> dict[str, str]:
    """Return the name that TensorFlow 1 gives to the average of each parameter, by its name.

    >>> average_names({"dense": {"kernel": jnp.zeros(2)}})
    {'dense/kernel': 'dense/kernel/ExponentialMovingAverage'}
    """
    return {name: f"{name}/ExponentialMovingAverage" for name in named_leaves(params)}


def _decay_now(decay: Number, num_updates: Number | None) -> jax.Array:
    """The decay in float32, whatever is averaged, as in TensorFlow 1."""
    decay = jnp.asarray(decay, jnp.float32)
    if num_updates is None:
        return decay
    count = jnp.asarray(num_updates, jnp.float32)
    return jnp.minimum(decay, (1 + count) / (10 + count))
