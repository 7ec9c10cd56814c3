"""One program for one process and for many: fit a line on all devices.

Command: python examples/processes.py, or ftrain launch -n 2 examples/processes.py
Time: 2 seconds on 2 CPU cores, 4 with two processes.
Result: w is close to [1, -2, 0.5] and b to 3. Run it twice and it resumes. Kill one of two
processes, and both restart from the newest checkpoint.
"""

import jax.numpy as jnp
import numpy as np

import ftrain

x = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
y = x @ np.array([1.0, -2.0, 0.5], np.float32) + 3.0


def loss_fn(params, batch, rng):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.mean(error**2)


# The environment sets which process this is. Connect before anything uses a device.
with ftrain.cluster.connect() as group:
    mesh = ftrain.cluster.make_mesh()  # the devices of all processes
    shard, shards = ftrain.cluster.batch_shard(mesh)  # this process's slice of every batch
    source = ftrain.data.ArraySource({"x": x, "y": y})
    state = ftrain.train(
        loss_fn,
        params={"w": jnp.zeros(3), "b": jnp.zeros(())},
        data=ftrain.data.Pipeline(source, batch_size=32, shard_index=shard, shard_count=shards),
        optimizer=ftrain.optimizers.adam(ftrain.schedules.cosine_decay(0.1, decay_steps=500)),
        steps=500,
        directory="runs/processes",
        mesh=mesh,
        group=group,
    )
    if group.is_chief:
        print(state.params)
