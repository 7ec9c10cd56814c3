"""Adam: steps scaled by running estimates of the gradient's first two moments."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ftrain.hyperparameters import check_fraction, check_not_negative
from ftrain.optimizers.rule import LearningRate, Rounding, Slots, from_rule
from ftrain.schedules import Scheduled, value_at


def adam(
    learning_rate: LearningRate = 0.001,
    beta1: Scheduled = 0.9,
    beta2: Scheduled = 0.999,
    epsilon: Scheduled = 1e-8,
    *,
    lazy: bool = True,
    slot_dtype: DTypeLike | None = None,
    packed: bool | None = None,
    rounding: Rounding = "compensated",
    weight_decay: Scheduled = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Kingma and Ba 2014, as in their section 2.1, with epsilon outside the correction.

    m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g * g
    p -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)

    With `lazy`, rows of a table that a step does not read keep their values and moments. Without
    it, all moments decay and move their rows at every step, as in TensorFlow 1, and a step costs
    time for every row. A scheduled beta is that of the update in both formulas. `slot_dtype`,
    `packed`, `rounding` and `weight_decay` are described at `from_rule`.
    """
    check_fraction(beta1=beta1, beta2=beta2)
    check_not_negative(epsilon=epsilon)

    def rule(
        gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ):
        # 1 - beta is computed in the parameters' own precision, as in TF1.
        first = jnp.asarray(value_at(beta1, count), parameter.dtype)
        second = jnp.asarray(value_at(beta2, count), parameter.dtype)
        small = value_at(epsilon, count, parameter.dtype)
        time = (count + 1).astype(parameter.dtype)
        m = slots["m"] + (1 - first) * (gradient - slots["m"])
        v = slots["v"] + (1 - second) * (gradient * gradient - slots["v"])
        corrected = rate * jnp.sqrt(1 - second**time) / (1 - first**time)
        return -corrected * m / (jnp.sqrt(v) + small), {"m": m, "v": v}

    return from_rule(
        rule,
        learning_rate,
        slots={"m": 0.0, "v": 0.0},
        lazy=lazy,
        slot_dtype=slot_dtype,
        packed=packed,
        rounding=rounding,
        weight_decay=weight_decay,
    )
