"""Gradient descent, plain or with momentum: a running sum of gradients as the direction."""

import jax
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_not_negative
from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule
from ftrain.schedules import Scheduled, value_at


def gradient_descent(
    learning_rate: LearningRate,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
    weight_decay: Scheduled = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """p -= lr * g.

    The rule itself has no slots. `slot_dtype` and `packed`, described at `from_rule`, apply to the
    remainders that `rounding` keeps for bfloat16 and float16 parameters. `weight_decay` is
    described there too.
    """

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        del parameter, count
        return -rate * gradient, slots

    return from_rule(
        rule,
        learning_rate,
        slot_dtype=slot_dtype,
        packed=packed,
        rounding=rounding,
        weight_decay=weight_decay,
    )


def momentum(
    learning_rate: LearningRate,
    momentum: Scheduled,
    use_nesterov: bool = False,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
    weight_decay: Scheduled = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Polyak 1964: a = momentum * a + g; p -= lr * a, with Nesterov p -= lr * (g + momentum * a).

    `slot_dtype`, `packed`, `rounding` and `weight_decay` are described at `from_rule`.
    """
    check_not_negative(momentum=momentum)

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        kept = value_at(momentum, count, parameter.dtype)
        accumulated = kept * slots["momentum"] + gradient
        direction = gradient + kept * accumulated if use_nesterov else accumulated
        return -rate * direction, {"momentum": accumulated}

    return from_rule(
        rule,
        learning_rate,
        slots={"momentum": 0.0},
        slot_dtype=slot_dtype,
        packed=packed,
        rounding=rounding,
        weight_decay=weight_decay,
    )
