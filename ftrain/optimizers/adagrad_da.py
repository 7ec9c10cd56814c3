"""Adagrad with dual averaging: parameters from the sum of all gradients, exactly zero if small."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_finite, check_not_negative, check_positive
from ftrain.optimizers.checks import check_at_init
from ftrain.optimizers.proximal import shrink
from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule


def adagrad_da(
    learning_rate: LearningRate,
    initial_gradient_squared_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
) -> optax.GradientTransformationExtraArgs:
    """Duchi et al. 2011, with t the number of this update, from 1:

    s += g; a += g * g; p = -lr * shrink(s, l1 * t) / (l2 * t * lr + sqrt(a))

    `slot_dtype`, `packed` and `rounding` are described at `from_rule`.
    """
    check_positive(
        initial_gradient_squared_accumulator_value=initial_gradient_squared_accumulator_value
    )
    strengths = {
        "l1_regularization_strength": l1_regularization_strength,
        "l2_regularization_strength": l2_regularization_strength,
    }
    check_finite(**strengths)

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        time = (count + 1).astype(parameter.dtype)
        total = slots["gradient_accumulator"] + gradient
        squares = slots["gradient_squared_accumulator"] + gradient * gradient
        shrunk = shrink(total, l1_regularization_strength * time)
        new = -rate * shrunk / (l2_regularization_strength * time * rate + jnp.sqrt(squares))
        return new - parameter, {
            "gradient_accumulator": total,
            "gradient_squared_accumulator": squares,
        }

    initial = {
        "gradient_accumulator": 0.0,
        "gradient_squared_accumulator": initial_gradient_squared_accumulator_value,
    }
    transform = from_rule(
        rule, learning_rate, slots=initial, slot_dtype=slot_dtype, packed=packed, rounding=rounding
    )
    return check_at_init(transform, check_not_negative, **strengths)
