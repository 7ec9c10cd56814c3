"""Proximal optimizers: l1 and l2 regularization as a part of the update.

The l1 strength makes parameters exactly zero, which adding the l1 norm to the loss would not.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from ftrain.hyperparameters import check_finite, check_not_negative, check_positive
from ftrain.optimizers.checks import check_at_init
from ftrain.optimizers.rule import LearningRate, Rounding, Rule, Slots, from_rule
from ftrain.schedules import Scheduled, value_at


def proximal_gradient_descent(
    learning_rate: LearningRate,
    l1_regularization_strength: Scheduled = 0.0,
    l2_regularization_strength: Scheduled = 0.0,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
) -> optax.GradientTransformationExtraArgs:
    """Duchi and Singer 2009: p = shrink(p - lr * g, lr * l1) / (1 + lr * l2).

    The rule itself has no slots. `slot_dtype` and `packed`, described at `from_rule`, apply to the
    remainders that `rounding` keeps for bfloat16 and float16 parameters.
    """
    l1 = l1_regularization_strength
    l2 = l2_regularization_strength

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        strengths = _strengths_at(l1, l2, count, parameter)
        new = _proximal_point(parameter - rate * gradient, rate, *strengths)
        return new - parameter, slots

    return from_regularized_rule(
        rule, learning_rate, {}, l1, l2, slot_dtype=slot_dtype, packed=packed, rounding=rounding
    )


def proximal_adagrad(
    learning_rate: LearningRate,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: Scheduled = 0.0,
    l2_regularization_strength: Scheduled = 0.0,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
) -> optax.GradientTransformationExtraArgs:
    """Duchi and Singer 2009 with Adagrad's rates r: a += g * g; r = lr / sqrt(a)

    p = shrink(p - r * g, r * l1) / (1 + r * l2)

    `slot_dtype`, `packed` and `rounding` are described at `from_rule`.
    """
    check_positive(initial_accumulator_value=initial_accumulator_value)
    l1 = l1_regularization_strength
    l2 = l2_regularization_strength

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        strengths = _strengths_at(l1, l2, count, parameter)
        accumulator = slots["accumulator"] + gradient * gradient
        own_rate = rate * jax.lax.rsqrt(accumulator)
        new = _proximal_point(parameter - own_rate * gradient, own_rate, *strengths)
        return new - parameter, {"accumulator": accumulator}

    slots = {"accumulator": initial_accumulator_value}
    return from_regularized_rule(
        rule, learning_rate, slots, l1, l2, slot_dtype=slot_dtype, packed=packed, rounding=rounding
    )


def shrink(values: jax.Array, threshold: ArrayLike) -> jax.Array:
    """Soft thresholding: move values towards zero by `threshold`, and those within it to zero."""
    return jnp.sign(values) * jnp.maximum(jnp.abs(values) - threshold, 0)


def _strengths_at(
    l1: Scheduled, l2: Scheduled, count: jax.Array, parameter: jax.Array
) -> tuple[ArrayLike, ArrayLike]:
    return value_at(l1, count, parameter.dtype), value_at(l2, count, parameter.dtype)


def _proximal_point(stepped: jax.Array, rate: jax.Array, l1: ArrayLike, l2: ArrayLike) -> jax.Array:
    """argmin over p of |p - stepped|**2 / (2 rate) + l1 |p| + l2 p**2 / 2."""
    return shrink(stepped, rate * l1) / (1 + l2 * rate)


def from_regularized_rule(
    rule: Rule,
    learning_rate: LearningRate,
    slots: Mapping[str, float],
    l1: Scheduled,
    l2: Scheduled,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """`from_rule`, with a check of the strengths; of their signs in `init`, as in TensorFlow 1."""
    strengths = {"l1_regularization_strength": l1, "l2_regularization_strength": l2}
    check_finite(**strengths)
    transform = from_rule(rule, learning_rate, slots, weight_decay=None, **options)
    return check_at_init(transform, check_not_negative, **strengths)
