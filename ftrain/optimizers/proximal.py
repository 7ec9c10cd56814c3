"""Proximal optimizers: gradient descent or Adagrad, followed by l1 and l2 regularization."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_finite, check_not_negative, check_positive
from ftrain.optimizers.checks import check_at_init
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

    The rule itself has no slots. `slot_dtype` and `packed`, described at `from_rule`, apply to the
    remainders that `rounding` keeps for bfloat16 and float16 parameters.
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
        new = _proximal_point(stepped, rate, l1_regularization_strength, l2_regularization_strength)
        return new - parameter, slots

    transform = from_rule(
        rule, learning_rate, slot_dtype=slot_dtype, packed=packed, rounding=rounding
    )
    return check_at_init(transform, check_not_negative, **strengths)


def proximal_adagrad(
    learning_rate: LearningRate,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
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
    strengths = {
        "l1_regularization_strength": l1_regularization_strength,
        "l2_regularization_strength": l2_regularization_strength,
    }
    check_finite(**strengths)

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        del count
        accumulator = slots["accumulator"] + gradient * gradient
        own_rate = rate * jax.lax.rsqrt(accumulator)
        stepped = parameter - own_rate * gradient
        new = _proximal_point(
            stepped, own_rate, l1_regularization_strength, l2_regularization_strength
        )
        return new - parameter, {"accumulator": accumulator}

    transform = from_rule(
        rule,
        learning_rate,
        slots={"accumulator": initial_accumulator_value},
        slot_dtype=slot_dtype,
        packed=packed,
        rounding=rounding,
    )
    return check_at_init(transform, check_not_negative, **strengths)


def shrink(values: jax.Array, threshold: jax.typing.ArrayLike) -> jax.Array:
    """Soft thresholding: move values towards zero by `threshold`, and those within it to zero."""
    return jnp.sign(values) * jnp.maximum(jnp.abs(values) - threshold, 0)


def _proximal_point(stepped: jax.Array, rate: jax.Array, l1: float, l2: float) -> jax.Array:
    """argmin over p of |p - stepped|**2 / (2 rate) + l1 |p| + l2 p**2 / 2."""
    return shrink(stepped, rate * l1) / (1 + l2 * rate)
