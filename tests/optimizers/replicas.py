"""Shared parts of the tests of synchronous replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ftrain import optimizers
from ftrain.optimizers import (
    arrivals,
    sync_replicas,
)

PARAMS = {"w": jnp.array([1.0, -2.0])}
IDENTITY = optax.scale(1.0)  # its updates are its gradients
GRADIENTS = [
    *([0.1, -1.7], [0.7, 0.3], [-0.2, 2.9], [1.3, -0.0], [0.55, -0.9]),
    *([3.1, 0.01], [-1.4, 0.6], [0.33, 0.77], [2.2, -2.2], [-0.6, 0.13]),
]


def assert_same(left, right):
    """Assert equality to the last bit, including the sign of zero."""
    assert jax.tree.structure(left) == jax.tree.structure(right)

    def same(a, b):
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (a, b)

    jax.tree.map(same, left, right)


def counts(state):
    return tuple(int(count) for count in arrivals(state))


@functools.cache
def compiled(needed, total=None, rate=None):
    """A transform that takes plain arrays of two numbers, and its compiled update."""
    inner = IDENTITY if rate is None else optimizers.gradient_descent(rate)
    transform = sync_replicas(inner, needed, total)
    return transform, jax.jit(transform.update)
