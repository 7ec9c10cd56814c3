"""A regression with batch normalisation in plain JAX, and tasks that configs of tests name."""

import jax
import jax.numpy as jnp
from regression import WEIGHTS, make_arrays

from ftrain import models
from ftrain.data import ArraySource
from ftrain.tasks import Task


def init(rng):
    params = {"w": jnp.asarray(WEIGHTS), "scale": jnp.ones(3)}
    statistics = {"mean": jnp.zeros(3), "var": jnp.ones(3), "count": jnp.zeros((), jnp.int32)}
    return params, statistics


def apply(params, model_state, x, *, rng, train):
    mean, var = (x.mean(0), x.var(0)) if train else (model_state["mean"], model_state["var"])
    if train:
        model_state = {
            "mean": 0.5 * model_state["mean"] + 0.5 * mean,
            "var": 0.5 * model_state["var"] + 0.5 * var,
            "count": model_state["count"] + 1,
        }
    normal = (x - mean) * jax.lax.rsqrt(var + 1e-3) * params["scale"]
    return normal @ params["w"], model_state


MODEL = models.Model(init, apply)


def loss_fn(params, batch, rng, model_state):
    y, model_state = MODEL.apply(params, model_state, batch["x"], rng=rng, train=True)
    return jnp.mean((y - batch["y"]) ** 2), {}, model_state


def exploding_loss(params, batch, rng, model_state):
    """Its gradient is NaN at step 5, which the model state counts: the slope of a root at zero."""
    loss, metrics, model_state = loss_fn(params, batch, rng, model_state)
    distance = jnp.abs(model_state["count"] - 5).astype(jnp.float32)
    return loss + 0 * jnp.sqrt(distance * params["w"][0] ** 2), metrics, model_state


def exploding_task():
    return Task(MODEL, exploding_loss, ArraySource(make_arrays()))


def raw_module_task():
    from flax import nnx

    return Task(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), loss_fn, ArraySource(make_arrays()))


def method_task():
    return Task(MODEL.init, loss_fn, ArraySource(make_arrays()))


def no_function_task():
    return Task(MODEL.params, loss_fn, ArraySource(make_arrays()))


def other_form_task():
    return Task(lambda rng: MODEL.init(rng)[0], loss_fn, ArraySource(make_arrays()))
