"""A mean kept as total and weight, so that means of parts combine to the mean of the whole."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp


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

    total: jax.typing.ArrayLike  # the sum of weight * value
    weight: jax.typing.ArrayLike  # the sum of the weights; not differentiated

    @classmethod
    def of(cls, values: jax.typing.ArrayLike, weights: jax.typing.ArrayLike | None = None) -> Self:
        """Return the mean of all `values`, weighted. Weights broadcast; a mask is a weight.

        A value with weight 0 does not count, NaN or not.
        """
        values = jnp.asarray(values)
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        if weights is None:
            return cls(jnp.sum(values), jnp.asarray(values.size, values.dtype))
        weights = jnp.broadcast_to(jnp.asarray(weights).astype(values.dtype), values.shape)
        return cls(jnp.sum(jnp.where(weights == 0, 0, values * weights)), jnp.sum(weights))

    @property
    def value(self) -> jax.Array:
        """The mean; 0 if nothing has weight."""
        total = _widen(self.total)
        weight = _widen(self.weight)
        divisor = jax.lax.stop_gradient(jnp.where(weight == 0, 1, weight))
        return total / divisor.astype(total.dtype)

    def merge(self, other: "WeightedMean") -> "WeightedMean":
        """Return the mean over both."""
        return WeightedMean(
            _widen(self.total) + _widen(other.total), _widen(self.weight) + _widen(other.weight)
        )


def is_weighted(node: Any) -> bool:
    """True for a `WeightedMean`; pass it as `is_leaf` to keep them whole."""
    return isinstance(node, WeightedMean)


def value_of(node: Any) -> Any:
    """Return the value of a `WeightedMean`; anything else unchanged."""
    return node.value if isinstance(node, WeightedMean) else node


def _widen(number: jax.typing.ArrayLike) -> jax.Array:
    array = jnp.asarray(number)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
