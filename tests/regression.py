"""A linear regression, the smallest training job, and the tasks that test configs name."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ftrain import metrics
from ftrain.cluster import batch_shard
from ftrain.data import ArraySource, Pipeline
from ftrain.hooks import SaveListener
from ftrain.models import Model
from ftrain.tasks import Task

WEIGHTS = np.array([1.0, -2.0, 0.5], np.float32)


def make_arrays(examples: int = 64) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(examples, 3)).astype(np.float32)
    return {"x": x, "y": x @ WEIGHTS + 0.25}


def init_params(rng: jax.Array | None = None):
    return {"w": jnp.zeros(3), "b": jnp.zeros(())}


def sharded(mesh, batch_size: int = 8) -> Pipeline:
    """Return a pipeline of this process's slice of every batch."""
    shard, shards = batch_shard(mesh)
    source = ArraySource(make_arrays())
    return Pipeline(source, batch_size=batch_size, shard_index=shard, shard_count=shards)


def loss_fn(params, batch, rng):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.mean(error**2), {"largest_error": jnp.max(jnp.abs(error))}


def regression(
    *,
    examples: int = 64,
    noise: float = 0.0,
    sizes: tuple[int, ...] = (1, 2),
    where: Path = Path("."),
    options=None,
    every_steps: int = 7,
) -> Task:
    """Return the regression, with `noise` from the step's rng added to the inputs.

    The other arguments only check how a config converts values.
    """
    assert isinstance(sizes, tuple)
    assert isinstance(where, Path)
    assert isinstance(every_steps, int)
    assert options is None or "name" not in options

    def noisy_loss(params, batch, rng):
        moved = batch["x"] + noise * jax.random.normal(rng, batch["x"].shape)
        return loss_fn(params, {"x": moved, "y": batch["y"]}, rng)

    def evaluate(params):
        return {"distance": float(jnp.max(jnp.abs(params["w"] - WEIGHTS)))}

    return Task(
        init_params,
        noisy_loss,
        ArraySource(make_arrays(examples)),
        evaluate,
        predict=lambda params, batch: {"y": batch["x"] @ params["w"] + params["b"]},
    )


def with_model() -> Task:
    """A model with a model state, in the place of a function that makes parameters."""

    def init(rng):
        return init_params(), {"calls": jnp.zeros(())}

    def apply(params, model_state, x, *, rng, train):
        calls = model_state["calls"] + (1.0 if train else 0.0)
        return x @ params["w"] + params["b"], {"calls": calls}

    model = Model(init, apply)

    def loss(params, batch, rng, model_state):
        y, model_state = model.apply(params, model_state, batch["x"], rng=rng, train=True)
        return jnp.mean((y - batch["y"]) ** 2), {}, model_state

    return Task(model, loss, ArraySource(make_arrays()))


def predict(params, batch):
    prediction = batch["x"] @ params["w"] + params["b"]
    return {"prediction": prediction, "error": jnp.abs(prediction - batch["y"])}


def measured(*, held_out: int = 21, entry: str = "error") -> Task:
    """The regression, measured on held-out examples: a number, a small array and a large one."""
    arrays = make_arrays(64 + held_out)
    arrays = {name: array[64:] for name, array in arrays.items()}
    arrays["label"] = (arrays["y"] > 0).astype(np.int32)
    found = {"r2": metrics.r2(labels="y"), "error": metrics.mean(entry)}
    found["recall"] = metrics.recall("none", logits="prediction")
    found["confusion"] = metrics.confusion_matrix(logits="class", classes=5)

    def outputs(params, batch):
        return predict(params, batch) | {"class": batch["label"]}

    return Task(
        init_params,
        loss_fn,
        ArraySource(make_arrays()),
        evaluation_source=ArraySource(arrays),
        predict=outputs,
        metrics=found,
    )


def forgetful(*, noise: float = 0.0) -> Task:
    """Return a task whose loss depends on the process id, so no other can repeat its steps."""
    own = os.getpid() / 1e7

    def loss(params, batch, rng):
        return loss_fn(params, batch, rng)[0] + noise + own * params["b"] ** 2

    return Task(init_params, loss, ArraySource(make_arrays()))


def without_rate() -> optax.GradientTransformation:
    return optax.sgd(0.1)


def broken(*, examples: int = 64):
    return "not a task"


def vector_loss() -> Task:
    return Task(
        init_params, lambda params, batch, rng: batch["y"] * params["b"], ArraySource(make_arrays())
    )


def slow() -> Task:
    """Return a task whose every step takes many minutes inside one compiled call."""

    def loss(params, batch, rng):
        def spin(_, matrix):
            return jnp.tanh(matrix @ matrix)

        return (
            loss_fn(params, batch, rng)[0]
            + 0 * jax.lax.fori_loop(0, 40_000, spin, jnp.ones((700, 700)))[0, 0]
        )

    return Task(init_params, loss, ArraySource(make_arrays()))


class Printing(SaveListener):
    """A listener that test configs name."""

    def after_save(self, step):
        print(f"saved {step}", flush=True)


def feed_nothing(step: int):
    return {}


def note(report):
    report.publish({"noted": float(report.step)})


def final(state):
    return {"final_step": int(state.step)}


def exploding(*, at: int = 7) -> Task:
    """Return a task whose loss becomes NaN at a step: the slope of a root is infinite at zero."""

    def loss(params, batch, rng):
        distance = jnp.abs(at - 1.0 - params["count"])
        return loss_fn(params, batch, rng)[0] - params["count"] + 0 * jnp.sqrt(distance)

    arrays = {name: array * 0.1 for name, array in make_arrays().items()}
    return Task(lambda rng: init_params() | {"count": jnp.zeros(())}, loss, ArraySource(arrays))
