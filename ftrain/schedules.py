"""Schedules: functions from a step to a value, for learning rates and anything else that changes over a run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.typing.ArrayLike], jax.typing.ArrayLike]


def cosine_decay(learning_rate: float, decay_steps: int, alpha: float = 0.0) -> Schedule:
    """Half a cosine from `learning_rate` down to `alpha * learning_rate` over `decay_steps`.

    lr * ((1 - alpha) * (1 + cos(pi * min(step, decay_steps) / decay_steps)) / 2 + alpha)
    """
    _check_positive("decay_steps", decay_steps)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        fraction = jnp.minimum(step, decay_steps) / decay_steps
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * fraction))
        return learning_rate * ((1.0 - alpha) * cosine + alpha)

    return schedule


def exponential_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Schedule:
    """lr * decay_rate ** (step / decay_steps), the exponent rounded down if `staircase`."""
    _check_positive("decay_steps", decay_steps)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        exponent = jnp.asarray(step) / decay_steps
        return learning_rate * jnp.power(decay_rate, jnp.floor(exponent) if staircase else exponent)

    return schedule


def warmup(schedule: float | Schedule, warmup_steps: int) -> Schedule:
    """`schedule`, scaled by a straight line from 0 at step 0 to 1 at `warmup_steps`."""
    _check_positive("warmup_steps", warmup_steps)

    def warmed(step: jax.typing.ArrayLike) -> jax.Array:
        value = schedule(step) if callable(schedule) else schedule
        return jnp.minimum(jnp.asarray(step) / warmup_steps, 1.0) * value

    return warmed


def _check_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be > 0, got {value}")
