"""What a schedule is, and the checks that all of them share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Step = jax.typing.ArrayLike
Schedule = Callable[[Step], jax.typing.ArrayLike]


def check_positive(**lengths: float) -> None:
    """Refuse a length, given by its name, that is not positive."""
    for name, value in lengths.items():
        if not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}")


def as_float(step: Step) -> jax.Array:
    """A step as a floating point number, in jax's default precision."""
    return jnp.asarray(step, dtype=jnp.result_type(float))
