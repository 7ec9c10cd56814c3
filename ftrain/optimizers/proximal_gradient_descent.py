"""Proximal gradient descent: a step, and then what l1 and l2 regularization leave of it."""

import jax
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_finite, check_not_negative
from ftrain.optimizers.checks import check_at_init
from ftrain.optimizers.proximal import proximal_point
from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule


def proximal_gradient_descent(
    learning_rate: LearningRate,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
) -> optax.GradientTransformationExtraArgs:
    """Duchi and Singer 2009: p = shrink(p - lr * g, lr * l1) / (1 + lr * l2).

    The rule itself keeps no slots: `slot_dtype` and `packed`, which are those of `from_rule`, concern the remainders
    that `rounding` keeps for bfloat16 and float16 parameters.
    """
    strengths = {
        "l1_regularization_strength": l1_regularization_strength,
        "l2_regularization_strength": l2_regularization_strength,
    }
    check_finite(**strengths)

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        del count
        stepped = parameter - rate * gradient
        new = proximal_point(stepped, rate, l1_regularization_strength, l2_regularization_strength)
        return new - parameter, slots

    transform = from_rule(
        rule, learning_rate, slot_dtype=slot_dtype, packed=packed, rounding=rounding
    )
    return check_at_init(transform, check_not_negative, **strengths)
