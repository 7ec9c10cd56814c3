"""Digits with batch normalisation and dropout, in plain JAX.

Command: python examples/models/digits_plain.py
Time: 10 seconds on 2 CPU cores.
Result: accuracy above 0.97 on held-out images; a second run resumes.
From a config: ftrain train examples/models/digits.toml task=examples.models.digits_plain:digits
"""

import jax
import jax.numpy as jnp
import optax

import ftrain
from ftrain.data import ArraySource, Pipeline
from ftrain.tasks import Task
from ftrain.tasks.digits import load_digits


def init(rng):
    first, second = jax.random.split(rng)
    params = {
        "hidden": jax.random.normal(first, (64, 128)) * 64**-0.5,
        "scale": jnp.ones(128),
        "offset": jnp.zeros(128),
        "out": jax.random.normal(second, (128, 10)) * 128**-0.5,
    }
    return params, {"mean": jnp.zeros(128), "variance": jnp.ones(128)}


def apply(params, model_state, image, *, rng, train):
    x = image.reshape(len(image), -1) @ params["hidden"]
    statistics = model_state
    if train:
        statistics = {"mean": x.mean(0), "variance": x.var(0)}
        model_state = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, model_state, statistics)
    x = (x - statistics["mean"]) * jax.lax.rsqrt(statistics["variance"] + 1e-5)
    x = jax.nn.relu(x * params["scale"] + params["offset"])
    if train:
        x = jnp.where(jax.random.bernoulli(rng, 0.75, x.shape), x / 0.75, 0)
    return x @ params["out"], model_state


train, test = load_digits()
METRICS = {"accuracy": ftrain.metrics.accuracy(), "f1": ftrain.metrics.f1()}
model = ftrain.models.Model(init, apply)


def loss_fn(params, batch, rng, model_state):
    logits, model_state = model.apply(params, model_state, batch["image"], rng=rng, train=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}, model_state


def predict(params, batch, model_state):
    return {"logits": model.apply(params, model_state, batch["image"])[0]}


def digits() -> Task:
    """The task of a config."""
    held_out = {"evaluation_source": ArraySource(test), "predict": predict, "metrics": METRICS}
    return Task(model, loss_fn, ArraySource(train), **held_out)


if __name__ == "__main__":
    data = Pipeline(ArraySource(train), batch_size=64)
    adam = ftrain.optimizers.adam(3e-3)
    directory = "runs/digits_plain"
    state = ftrain.train(loss_fn, model, data, optimizer=adam, steps=300, directory=directory)
    held_out = Pipeline(ArraySource(test), batch_size=64, epochs=1, last="pad")
    found = ftrain.evaluate(predict, state, held_out, METRICS)
    print(f"accuracy {found['accuracy']:.3f}, F1 {found['f1']:.3f} on held-out images")
