"""Your own training loop, with your own hook and an optax optimizer.

Command: python examples/own_loop.py
Time: 3 seconds on 2 CPU cores.
Result: it stops after a few hundred steps, when the loss is below 1e-3.
"""

import jax.numpy as jnp
import numpy as np
import optax

import ftrain

angles = np.linspace(0, 2 * np.pi, 512, dtype=np.float32)
points = {"angle": angles, "height": np.sin(angles)}
data = ftrain.data.Pipeline(ftrain.data.ArraySource(points), batch_size=64)


class StopBelow(ftrain.Hook):
    """Stop once the loss has fallen below a limit."""

    def __init__(self, limit: float, when: ftrain.training.Trigger):
        self.limit = limit
        self.when = when

    def after_step(self, report: ftrain.training.Report) -> None:
        if report.read("loss") < self.limit:
            report.stop(f"the loss is below {self.limit}")


def loss_fn(params, batch, rng):
    powers = (batch["angle"][:, None] / np.pi - 1) ** np.arange(1, 8, 2)
    return jnp.mean((powers @ params - batch["height"]) ** 2)


optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
step = ftrain.make_step(loss_fn, optimizer)
state = ftrain.TrainState.create(jnp.zeros(4), optimizer)
with ftrain.Run(
    step, state, data, steps=20_000, hooks=[StopBelow(1e-3, when=ftrain.every(steps=50))]
) as run:
    while not run.should_stop():
        # All steps up to the next that a hook needs, in one compiled call; step() takes one.
        run.advance()
print(f"step {run.steps_taken}: {run.stop_reason}")
