"""RMSProp: steps scaled by a running mean of squared gradients."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_not_negative, check_unit
from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule
from ftrain.schedules import Scheduled, value_at


def rmsprop(
    learning_rate: LearningRate,
    decay: Scheduled = 0.9,
    momentum: Scheduled = 0.0,
    epsilon: Scheduled = 1e-10,
    centered: bool = False,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
    weight_decay: Scheduled = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Hinton 2012: r = decay * r + (1 - decay) * g * g, initially 1

    d = momentum * d + lr * g / sqrt(r + epsilon); p -= d

    With `centered`, h = decay * h + (1 - decay) * g, and r - h * h replaces r in the square root.

    `slot_dtype`, `packed`, `rounding` and `weight_decay` are described at `from_rule`.
    """
    check_unit(decay=decay)
    check_not_negative(momentum=momentum, epsilon=epsilon)

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        fresh = 1 - jnp.asarray(value_at(decay, count), parameter.dtype)
        kept = value_at(momentum, count, parameter.dtype)
        small = value_at(epsilon, count, parameter.dtype)
        rms = slots["rms"] + (gradient * gradient - slots["rms"]) * fresh
        means = {"mg": slots["mg"] + (gradient - slots["mg"]) * fresh} if centered else {}
        variance = rms - means["mg"] * means["mg"] if centered else rms
        step = kept * slots["momentum"] + rate * gradient * jax.lax.rsqrt(variance + small)
        return -step, {"rms": rms, "momentum": step} | means

    slots = {"rms": 1.0, "momentum": 0.0} | ({"mg": 0.0} if centered else {})
    return from_rule(
        rule,
        learning_rate,
        slots=slots,
        slot_dtype=slot_dtype,
        packed=packed,
        rounding=rounding,
        weight_decay=weight_decay,
    )
