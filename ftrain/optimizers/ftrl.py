"""FTRL-proximal: follow the regularized leader, for models that should stay sparse."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_finite, check_not_negative, check_not_positive
from ftrain.optimizers.checks import check_at_init
from ftrain.optimizers.proximal import shrink
from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule
from ftrain.schedules import Scheduled, value_at


def ftrl(
    learning_rate: LearningRate,
    learning_rate_power: Scheduled = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: Scheduled = 0.0,
    l2_regularization_strength: Scheduled = 0.0,
    l2_shrinkage_regularization_strength: Scheduled = 0.0,
    beta: Scheduled = 0.0,
    *,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
) -> optax.GradientTransformationExtraArgs:
    """McMahan et al. 2013, with k = learning_rate_power:

    n' = n + g * g; z += g + 2 * l2_shrinkage * p - (n'**-k - n**-k) / lr * p; n = n'
    p = -shrink(z, l1) / (n**-k / lr + 2 * l2 + beta / lr)

    `slot_dtype`, `packed` and `rounding` are described at `from_rule`.
    """
    check_not_negative(
        initial_accumulator_value=initial_accumulator_value,
        l1_regularization_strength=l1_regularization_strength,
        l2_regularization_strength=l2_regularization_strength,
        l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
    )
    check_finite(beta=beta)
    check_not_positive(learning_rate_power=learning_rate_power)

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        def at(number: Scheduled) -> float | jax.Array:
            return value_at(number, count, parameter.dtype)

        def power(accumulator: jax.Array) -> jax.Array:
            exponent = at(learning_rate_power)
            is_root = isinstance(exponent, float) and exponent == -0.5
            return jnp.sqrt(accumulator) if is_root else jnp.power(accumulator, -exponent)

        accumulator = slots["accum"] + gradient * gradient
        shrunk = gradient + 2 * at(l2_shrinkage_regularization_strength) * parameter
        linear = (
            slots["linear"]
            + shrunk
            - (power(accumulator) - power(slots["accum"])) / rate * parameter
        )
        curvature = power(accumulator) / rate + 2 * (
            at(l2_regularization_strength) + at(beta) / (2 * rate)
        )
        new = -shrink(linear, at(l1_regularization_strength)) / curvature
        return new - parameter, {"accum": accumulator, "linear": linear}

    slots = {"accum": initial_accumulator_value, "linear": 0.0}
    transform = from_rule(
        rule,
        learning_rate,
        slots,
        slot_dtype=slot_dtype,
        packed=packed,
        rounding=rounding,
        weight_decay=None,
    )
    return check_at_init(transform, check_not_negative, beta=beta)
