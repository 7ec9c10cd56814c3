"""Adadelta: steps in units of the steps taken before."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_not_negative, check_unit
from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule
from ftrain.schedules import Scheduled, value_at


def adadelta(
    learning_rate: LearningRate = 0.001,
    rho: Scheduled = 0.95,
    epsilon: Scheduled = 1e-8,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
    weight_decay: Scheduled = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Zeiler 2012: a = rho * a + (1 - rho) * g * g; d = g * sqrt(u + epsilon) / sqrt(a + epsilon)

    u = rho * u + (1 - rho) * d * d; p -= lr * d

    `slot_dtype`, `packed`, `rounding` and `weight_decay` are described at `from_rule`.
    """
    check_unit(rho=rho)
    check_not_negative(epsilon=epsilon)

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        keep = jnp.asarray(value_at(rho, count), parameter.dtype)
        small = value_at(epsilon, count, parameter.dtype)
        squares = slots["accum"] * keep + gradient * gradient * (1 - keep)
        direction = (
            jnp.sqrt(slots["accum_update"] + small) * jax.lax.rsqrt(squares + small) * gradient
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
        weight_decay=weight_decay,
    )
