"""Gradient descent: p -= lr * g."""

import jax
import optax
from jax.typing import DTypeLike

from ftrain.optimizers.rule import LearningRate, Slots, from_rule


def gradient_descent(
    learning_rate: LearningRate, *, slot_dtype: DTypeLike | None = None
) -> optax.GradientTransformation:
    """p -= lr * g."""

    def rule(gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array):
        del parameter, count
        return -rate * gradient, slots

    return from_rule(rule, learning_rate, slot_dtype=slot_dtype)
