"""Adam: steps scaled by running estimates of the gradient's first two moments."""

import jax
import jax.numpy as jnp
import optax

from ftrain.optimizers.rule import LearningRate, Slots, from_rule


def adam(
    learning_rate: LearningRate = 0.001, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
) -> optax.GradientTransformation:
    """Kingma and Ba 2014, in the form of their section 2.1, where epsilon stands outside the correction.

    m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g * g
    p -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)
    """
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")

    def rule(gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array):
        time = (count + 1).astype(parameter.dtype)
        m = slots["m"] + (1 - beta1) * (gradient - slots["m"])
        v = slots["v"] + (1 - beta2) * (gradient * gradient - slots["v"])
        corrected = rate * jnp.sqrt(1 - beta2**time) / (1 - beta1**time)
        return -corrected * m / (jnp.sqrt(v) + epsilon), {"m": m, "v": v}

    return from_rule(rule, learning_rate, slots={"m": 0.0, "v": 0.0})
