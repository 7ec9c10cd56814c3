"""One small network with batch normalisation and dropout, in each library and in plain JAX."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from ftrain import models

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)
        self.activation = lambda x: jnp.tanh(x)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(self.dropout(self.activation(self.norm(x))))


class LinenNet(linen.Module):
    width: int = 4

    @linen.compact
    def __call__(self, x, *, train: bool):
        x = linen.Dense(self.width)(x)
        self.sow("intermediates", "hidden", x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return linen.Dense(2)(linen.Dropout(0.5, deterministic=not train)(jnp.tanh(x)))


class EquinoxNet(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear
    order: jax.Array
    activation: object
    name: str = eqx.field(static=True)

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(3, 4, key=first)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", momentum=0.9, mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.out = eqx.nn.Linear(4, 2, key=second)
        self.order = jnp.arange(2)
        self.activation = lambda x: jnp.tanh(x)
        self.name = "net"

    def __call__(self, x, state, *, key):
        x, state = self.norm(self.hidden(x), state)
        return self.out(self.dropout(self.activation(x), key=key))[self.order], state


def haiku_net(x, is_training):
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(
        hk.Linear(4)(x), is_training
    )
    x = jnp.tanh(x)
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.5, x)
    return hk.Linear(2)(x)


def init_plain(rng):
    first, second = jax.random.split(rng)
    params = {
        "hidden": jax.random.normal(first, (3, 4)),
        "out": jax.random.normal(second, (4, 2)),
    }
    return params, {"mean": jnp.zeros(4), "var": jnp.ones(4)}


def apply_plain(params, model_state, x, *, rng, train):
    x = x @ params["hidden"]
    used = {"mean": x.mean(0), "var": x.var(0)} if train else model_state
    if train:
        model_state = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, model_state, used)
    x = jnp.tanh((x - used["mean"]) / jnp.sqrt(used["var"] + 1e-5))
    if train:
        x = jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), 2 * x, 0)
    return x @ params["out"], model_state


MAKE = {
    "plain": lambda: models.Model(init_plain, apply_plain),
    "nnx": lambda: models.nnx(NnxNet),
    "nnx instance": lambda: models.nnx(NnxNet(nnx.Rngs(3))),
    "linen": lambda: models.linen(LinenNet(), X[:1]),
    "equinox": lambda: models.equinox(EquinoxNet),
    "equinox instance": lambda: models.equinox(
        *eqx.nn.make_with_state(EquinoxNet)(jax.random.key(3))
    ),
    "haiku": lambda: models.haiku(haiku_net, jax.ShapeDtypeStruct((1, 3), jnp.float32)),
    "haiku transformed": lambda: models.haiku(hk.transform_with_state(haiku_net), X[:1]),
}
