"""A linear regression, the smallest job that can be trained; also a task that configs of tests name."""

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.data import ArraySource
from ftrain.tasks import Task

WEIGHTS = np.array([1.0, -2.0, 0.5], np.float32)


def make_arrays(examples: int = 64) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(examples, 3)).astype(np.float32)
    return {"x": x, "y": x @ WEIGHTS + 0.25}


def init_params(rng: jax.Array | None = None):
    return {"w": jnp.zeros(3), "b": jnp.zeros(())}


def loss_fn(params, batch, rng):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.mean(error**2), {"largest_error": jnp.max(jnp.abs(error))}


def regression(*, examples: int = 64, noise: float = 0.0) -> Task:
    """The regression, its batches disturbed by `noise` drawn from the step's rng."""

    def noisy_loss(params, batch, rng):
        moved = batch["x"] + noise * jax.random.normal(rng, batch["x"].shape)
        return loss_fn(params, {"x": moved, "y": batch["y"]}, rng)

    def evaluate(params):
        return {"distance": float(jnp.max(jnp.abs(params["w"] - WEIGHTS)))}

    return Task(init_params, noisy_loss, ArraySource(make_arrays(examples)), evaluate)


def broken(*, examples: int = 64):
    return "not a task"
