"""Adagrad: step sizes that shrink with the squared gradients seen so far."""

import jax
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_positive
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
