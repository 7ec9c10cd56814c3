"""Schedules composed of others: warmup, joined schedules, and common compositions."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ftrain.hyperparameters import check_finite, check_not_negative, check_positive
from ftrain.schedules.decay import Schedule, Step, as_float, value_at


def warmup(schedule: float | Schedule, warmup_steps: int) -> Schedule:
    """`schedule`, scaled linearly from 0 at step 0 to 1 at `warmup_steps`."""
    check_positive(warmup_steps=warmup_steps)
    check_finite(schedule=schedule)

    def warmed(step: Step) -> jax.Array:
        return jnp.minimum(as_float(step) / warmup_steps, 1.0) * value_at(schedule, step)

    return warmed


def join(schedules: Sequence[float | Schedule], boundaries: Sequence[int]) -> Schedule:
    """schedules[0] before step boundaries[0], schedules[1] from there on, and so on.

    Each schedule counts its own steps, from 0 at its boundary.
    """
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(
            "schedules must have one more entry than boundaries, "
            f"got {len(schedules)} and {len(boundaries)}"
        )
    for schedule in schedules:
        check_finite(schedules=schedule)
    if list(boundaries) != sorted(boundaries):
        raise ValueError(f"boundaries must be in ascending order, got {list(boundaries)}")

    def joined(step: Step) -> jax.Array:
        now = jnp.asarray(step)
        value = jnp.asarray(value_at(schedules[0], now))
        for boundary, schedule in zip(boundaries, schedules[1:], strict=True):
            value = jnp.where(
                now < boundary, value, value_at(schedule, jnp.maximum(now - boundary, 0))
            )
        return value

    return joined


def warmup_stable_decay(
    learning_rate: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    end_learning_rate: float = 0.0,
) -> Schedule:
    """Rise linearly, stay constant, decay linearly to `end_learning_rate`, and stay there."""
    check_positive(warmup_steps=warmup_steps, decay_steps=decay_steps)
    check_not_negative(stable_steps=stable_steps)
    check_finite(learning_rate=learning_rate, end_learning_rate=end_learning_rate)

    def schedule(step: Step) -> jax.Array:
        now = as_float(step)
        rising = jnp.minimum(now / warmup_steps, 1.0)
        decayed = jnp.clip((now - warmup_steps - stable_steps) / decay_steps, 0.0, 1.0)
        return rising * (learning_rate + decayed * (end_learning_rate - learning_rate))

    return schedule


def inverse_sqrt(learning_rate: float, warmup_steps: int) -> Schedule:
    """lr * min(step / warmup_steps, sqrt(warmup_steps / step)); the peak is at `warmup_steps`."""
    check_positive(warmup_steps=warmup_steps)
    check_finite(learning_rate=learning_rate)

    def schedule(step: Step) -> jax.Array:
        now = as_float(step)
        return learning_rate * jnp.minimum(
            now / warmup_steps, jnp.sqrt(warmup_steps / jnp.maximum(now, 1.0))
        )

    return schedule
