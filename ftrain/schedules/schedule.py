"""What a schedule is: a function of the step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Step = jax.typing.ArrayLike
Schedule = Callable[[Step], jax.typing.ArrayLike]


def as_float(step: Step) -> jax.Array:
    """A step as a floating point number, in jax's default precision."""
    return jnp.asarray(step, dtype=jnp.result_type(float))
