"""Adagrad and Adadelta: step sizes from the squared gradients seen so far."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_not_negative, check_positive, check_unit
from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule


def adagrad(
    learning_rate: LearningRate,
    initial_accumulator_value: float = 0.1,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
) -> optax.GradientTransformationExtraArgs:
    """Duchi et al. 2011: a += g * g; p -= lr * g / sqrt(a).

    `slot_dtype`, `packed` and `rounding` are described at `from_rule`.
    """
    check_positive(initial_accumulator_value=initial_accumulator_value)

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        del parameter, count
        accumulator = slots["accumulator"] + gradient * gradient
        return -rate * gradient * jax.lax.rsqrt(accumulator), {"accumulator": accumulator}

    return from_rule(
        rule,
        learning_rate,
        slots={"accumulator": initial_accumulator_value},
        slot_dtype=slot_dtype,
        packed=packed,
        rounding=rounding,
    )


def adadelta(
    learning_rate: LearningRate = 0.001,
    rho: float = 0.95,
    epsilon: float = 1e-8,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
) -> optax.GradientTransformationExtraArgs:
    """Zeiler 2012: a = rho * a + (1 - rho) * g * g; d = g * sqrt(u + epsilon) / sqrt(a + epsilon)

    u = rho * u + (1 - rho) * d * d; p -= lr * d

    `slot_dtype`, `packed` and `rounding` are described at `from_rule`.
    """
    check_unit(rho=rho)
    check_not_negative(epsilon=epsilon)

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        del count
        keep = jnp.asarray(rho, parameter.dtype)
        squares = slots["accum"] * keep + gradient * gradient * (1 - keep)
        direction = (
            jnp.sqrt(slots["accum_update"] + epsilon) * jax.lax.rsqrt(squares + epsilon) * gradient
        )
        steps = slots["accum_update"] * keep + direction * direction * (1 - keep)
        return -rate * direction, {"accum": squares, "accum_update": steps}

    return from_rule(
        rule,
        learning_rate,
        slots={"accum": 0.0, "accum_update": 0.0},
        slot_dtype=slot_dtype,
        packed=packed,
        rounding=rounding,
    )
