"""Gradient descent: p -= lr * g."""

import jax
import optax

from ftrain.optimizers.rule import LearningRate, Slots, from_rule


def gradient_descent(learning_rate: LearningRate) -> optax.GradientTransformation:
    """p -= lr * g."""

    def rule(gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array):
        del parameter, count
        return -rate * gradient, slots

    return from_rule(rule, learning_rate)
