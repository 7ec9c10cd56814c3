"""Gradient descent: p -= lr * g."""

import jax
import optax
from jax.typing import DTypeLike

from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule


def gradient_descent(
    learning_rate: LearningRate,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
) -> optax.GradientTransformationExtraArgs:
    """p -= lr * g.

    The rule itself has no slots. `slot_dtype` and `packed`, described at `from_rule`, apply to the
    remainders that `rounding` keeps for bfloat16 and float16 parameters.
    """

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        del parameter, count
        return -rate * gradient, slots

    return from_rule(rule, learning_rate, slot_dtype=slot_dtype, packed=packed, rounding=rounding)
