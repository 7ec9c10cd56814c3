"""The quickstart of the README: fit a line.

Command: python examples/quickstart.py
Time: 3 seconds on 2 CPU cores.
Result: w is close to [1, -2, 0.5] and b to 3; run it twice and it resumes.
"""

import jax.numpy as jnp
import numpy as np

import ftrain

x = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
y = x @ np.array([1.0, -2.0, 0.5], np.float32) + 3.0
data = ftrain.data.Pipeline(ftrain.data.ArraySource({"x": x, "y": y}), batch_size=32)


def loss_fn(params, batch, rng):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.mean(error**2), {"largest_error": jnp.max(jnp.abs(error))}


state = ftrain.train(
    loss_fn,
    params={"w": jnp.zeros(3), "b": jnp.zeros(())},
    data=data,
    optimizer=ftrain.optimizers.adam(ftrain.schedules.cosine_decay(0.1, decay_steps=500)),
    steps=500,
    directory="runs/quickstart",
)
print(state.params)
