"""Adagrad: step sizes that shrink with the squared gradients seen so far."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_positive
from ftrain.optimizers.proximal import from_regularized_rule, shrink
from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule
from ftrain.schedules import Scheduled, value_at


def adagrad(
    learning_rate: LearningRate,
    initial_accumulator_value: float = 0.1,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
    weight_decay: Scheduled = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Duchi et al. 2011: a += g * g; p -= lr * g / sqrt(a).

    `slot_dtype`, `packed`, `rounding` and `weight_decay` are described at `from_rule`.
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
        weight_decay=weight_decay,
    )


def adagrad_da(
    learning_rate: LearningRate,
    initial_gradient_squared_accumulator_value: float = 0.1,
    l1_regularization_strength: Scheduled = 0.0,
    l2_regularization_strength: Scheduled = 0.0,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
) -> optax.GradientTransformationExtraArgs:
    """Adagrad with dual averaging: parameters are computed from the sum of all gradients.

    Duchi et al. 2011, with t the number of this update, from 1:
    s += g; a += g * g; p = -lr * shrink(s, l1 * t) / (l2 * t * lr + sqrt(a))

    `slot_dtype`, `packed` and `rounding` are described at `from_rule`.
    """
    initial_squares = initial_gradient_squared_accumulator_value
    check_positive(initial_gradient_squared_accumulator_value=initial_squares)
    l1 = l1_regularization_strength
    l2 = l2_regularization_strength

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        l1_now = value_at(l1, count, parameter.dtype)
        l2_now = value_at(l2, count, parameter.dtype)
        time = (count + 1).astype(parameter.dtype)
        total = slots["gradient_accumulator"] + gradient
        squares = slots["gradient_squared_accumulator"] + gradient * gradient
        new = -rate * shrink(total, l1_now * time) / (l2_now * time * rate + jnp.sqrt(squares))
        return new - parameter, {
            "gradient_accumulator": total,
            "gradient_squared_accumulator": squares,
        }

    slots = {"gradient_accumulator": 0.0, "gradient_squared_accumulator": initial_squares}
    return from_regularized_rule(
        rule, learning_rate, slots, l1, l2, slot_dtype=slot_dtype, packed=packed, rounding=rounding
    )
