"""Proximal steps: what l1 and l2 regularization leave of a parameter after a step."""

import jax
import jax.numpy as jnp


def shrink(values: jax.Array, threshold: jax.typing.ArrayLike) -> jax.Array:
    """Soft thresholding: values moved towards zero by `threshold`, those within it to zero."""
    return jnp.sign(values) * jnp.maximum(jnp.abs(values) - threshold, 0)


def proximal_point(stepped: jax.Array, rate: jax.Array, l1: float, l2: float) -> jax.Array:
    """argmin over p of |p - stepped|**2 / (2 rate) + l1 |p| + l2 p**2 / 2."""
    return shrink(stepped, rate * l1) / (1 + l2 * rate)
