"""Exponential moving averages of parameters: often better to evaluate than the parameters themselves."""

import dataclasses

import jax
import jax.numpy as jnp

from ftrain.tree import Tree, named_leaves

Number = float | jax.Array


def update_averages(averages: Tree, values: Tree, decay: Number, num_updates: Number | None = None) -> Tree:
    """averages -= (1 - d) * (averages - values), with d = decay, or with n = num_updates

    d = min(decay, (1 + n) / (10 + n)): the smaller decay of the first updates lets them leave the start quickly.
    """
    fresh = 1 - _decay_now(decay, num_updates)

    def move(mean: jax.Array, new: jax.Array) -> jax.Array:
        return mean - fresh.astype(mean.dtype) * (mean - jnp.asarray(new, mean.dtype))

    return jax.tree.map(move, averages, values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ZeroDebiased:
    """Averages that start from zero and are corrected for it, for values that have no first one to start from.

    b -= (1 - d) * (b - values), and the average is b / (1 - d**t) after t updates, with d as in `update_averages`.

        averages = ZeroDebiased.create(like=values)
        averages = averages.update(values, 0.99)
        averages.values
    """

    values: Tree  # the averages
    biased: Tree
    count: jax.Array  # updates so far

    @classmethod
    def create(cls, like: Tree) -> "ZeroDebiased":
        """Averages of zero, in the shapes of `like`, before the first update."""
        return cls(jax.tree.map(jnp.zeros_like, like), jax.tree.map(jnp.zeros_like, like), jnp.zeros((), jnp.int32))

    def update(self, values: Tree, decay: Number, num_updates: Number | None = None) -> "ZeroDebiased":
        """The averages after one more update."""
        biased = update_averages(self.biased, values, decay, num_updates)
        count = self.count + 1
        fresh = 1 - _decay_now(decay, num_updates)

        def correct(mean: jax.Array) -> jax.Array:
            wide = jnp.promote_types(mean.dtype, jnp.float32)  # 1 - d**t is zero in less
            share = 1 - (1 - fresh.astype(wide)) ** count.astype(wide)
            return (mean.astype(wide) / share).astype(mean.dtype)

        return ZeroDebiased(jax.tree.map(correct, biased), biased, count)


def average_names(params: Tree) -> dict[str, str]:
    """The name that the reference gives to the average of each parameter, by the parameter's own.

    >>> average_names({"dense": {"kernel": jnp.zeros(2)}})
    {'dense/kernel': 'dense/kernel/ExponentialMovingAverage'}
    """
    return {name: f"{name}/ExponentialMovingAverage" for name in named_leaves(params)}


def _decay_now(decay: Number, num_updates: Number | None) -> jax.Array:
    """The decay in float32, whatever is averaged, as the reference has it."""
    decay = jnp.asarray(decay, jnp.float32)
    if num_updates is None:
        return decay
    count = jnp.asarray(num_updates, jnp.float32)
    return jnp.minimum(decay, (1 + count) / (10 + count))
