"""A monitored run: evaluation, early stopping, a checkpoint listener, a device failure, and timing.

Command: python examples/monitored.py
Time: 4 seconds on 2 CPU cores.
Result: it resumes after the failure, stops when the evaluation no longer improves, and prints where
the time went.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import ftrain

rng = np.random.default_rng(0)
x = rng.normal(size=(2000, 8)).astype(np.float32)
y = np.sin(x @ rng.normal(size=8)).astype(np.float32)
data = ftrain.data.Pipeline(ftrain.data.ArraySource({"x": x[:1500], "y": y[:1500]}), batch_size=50)


def predict(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def loss_fn(params, batch, rng):
    return jnp.mean((predict(params, batch["x"]) - batch["y"]) ** 2)


def evaluate(params):
    return {"error": float(jnp.mean(jnp.abs(predict(params, x[1500:]) - y[1500:])))}


class Announce(ftrain.hooks.SaveListener):
    def after_save(self, step):
        print(f"checkpoint of step {step} written")


class LoseDevice(ftrain.Hook):
    """Simulate a device that fails once."""

    when = ftrain.training.at(1300)
    lost = False

    def after_step(self, report):
        if not self.lost:
            self.lost = True
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: the device went away")

    def begin(self, report):
        report.listen(notice=self.show)

    def show(self, text):
        if "resuming" in text:
            print("recovered")


first, second = jax.random.split(jax.random.key(0))
params = {
    "w1": jax.random.normal(first, (8, 32)) * 0.4,
    "b1": jnp.zeros(32),
    "w2": jax.random.normal(second, (32,)) * 0.2,
}
optimizer = ftrain.optimizers.adam(0.01)
with tempfile.TemporaryDirectory() as directory:
    run = ftrain.Run(
        ftrain.make_step(loss_fn, optimizer),
        ftrain.TrainState.create(params, optimizer),
        data,
        steps=50_000,
        directory=directory,
        hooks=[
            ftrain.hooks.Evaluator(evaluate, when=ftrain.every(steps=500)),
            ftrain.hooks.StopWhen("eval/error", patience=3, least_change=1e-3),
            ftrain.hooks.CheckpointSaver(
                f"{directory}/checkpoints", when=ftrain.every(steps=1000), listeners=[Announce()]
            ),
            LoseDevice(),
        ],
    )
    with run:
        while not run.should_stop():
            run.advance()
print(f"stopped: {run.stop_reason}")
for name, seconds in run.timing.seconds().items():
    print(f"{name:<24}{seconds:8.3f} s")
