"""Proximal Adagrad: Adagrad's step, and then what l1 and l2 regularization leave of it."""

import jax
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_finite, check_not_negative, check_positive
from ftrain.optimizers.checks import check_at_init
from ftrain.optimizers.proximal import proximal_point
from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule


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
    """Duchi and Singer 2009 on Adagrad's rates, r: a += g * g; r = lr / sqrt(a)

    p = shrink(p - r * g, r * l1) / (1 + r * l2)

    `slot_dtype`, `packed` and `rounding` are those of `from_rule`.
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
        new = proximal_point(
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
