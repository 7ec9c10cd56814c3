"""The types of schedules; exponential, inverse time, polynomial, piecewise constant decay."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ftrain.hyperparameters import check_finite, check_positive

Step = jax.typing.ArrayLike
Schedule = Callable[[Step], jax.typing.ArrayLike]
Scheduled = float | jax.Array | Schedule  # a number, constant or changing


def value_at(
    number: Scheduled, step: Step, dtype: jax.typing.DTypeLike | None = None
) -> float | jax.Array:
    """Return the value of a number at a step; that of a schedule in `dtype`."""
    return jnp.asarray(number(step), dtype) if callable(number) else number


def as_float(step: Step) -> jax.Array:
    """Convert a step to floating point, in jax's default precision."""
    return jnp.asarray(step, dtype=jnp.result_type(float))


def exponential_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """lr * decay_rate ** (step / decay_steps), the exponent rounded down if `staircase`."""
    check_positive(decay_steps=decay_steps)
    check_finite(learning_rate=learning_rate, decay_rate=decay_rate)

    def schedule(step: Step) -> jax.Array:
        return learning_rate * jnp.power(decay_rate, _progress(step, decay_steps, staircase))

    return schedule


def natural_exp_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """lr * exp(-decay_rate * step / decay_steps), the quotient rounded down if `staircase`."""
    check_positive(decay_steps=decay_steps)
    check_finite(learning_rate=learning_rate, decay_rate=decay_rate)

    def schedule(step: Step) -> jax.Array:
        return learning_rate * jnp.exp(-decay_rate * _progress(step, decay_steps, staircase))

    return schedule


def inverse_time_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Schedule:
    """lr / (1 + decay_rate * step / decay_steps), the quotient rounded down if `staircase`."""
    check_positive(decay_steps=decay_steps)
    check_finite(learning_rate=learning_rate, decay_rate=decay_rate)

    def schedule(step: Step) -> jax.Array:
        return learning_rate / (1.0 + decay_rate * _progress(step, decay_steps, staircase))

    return schedule


def polynomial_decay(
    learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> Schedule:
    """(lr - end) * (1 - step / decay_steps) ** power + end, and `end` from there on.

    With `cycle`, `decay_steps` is extended to the first multiple of itself that the step has not
    passed, so that the rate jumps up and decays again.
    """
    check_positive(decay_steps=decay_steps)
    check_finite(learning_rate=learning_rate, end_learning_rate=end_learning_rate, power=power)

    def schedule(step: Step) -> jax.Array:
        now = as_float(step)
        length = (
            decay_steps * jnp.maximum(1.0, jnp.ceil(now / decay_steps)) if cycle else decay_steps
        )
        remaining = 1.0 - (now if cycle else jnp.minimum(now, decay_steps)) / length
        return (learning_rate - end_learning_rate) * jnp.power(remaining, power) + end_learning_rate

    return schedule


def piecewise_constant(boundaries: Sequence[int], values: Sequence[float]) -> Schedule:
    """values[0] up to and including step boundaries[0], values[1] up to boundaries[1], ..."""
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            "values must have one more entry than boundaries, "
            f"got {len(values)} and {len(boundaries)}"
        )
    for value in values:
        check_finite(values=value)
    if list(boundaries) != sorted(boundaries):
        raise ValueError(f"boundaries must be in ascending order, got {list(boundaries)}")

    def schedule(step: Step) -> jax.Array:
        piece = jnp.searchsorted(jnp.asarray(boundaries), jnp.asarray(step), side="left")
        return jnp.asarray(values, dtype=jnp.result_type(float))[piece]

    return schedule


def _progress(step: Step, decay_steps: int, staircase: bool) -> jax.Array:
    quotient = as_float(step) / decay_steps
    return jnp.floor(quotient) if staircase else quotient
