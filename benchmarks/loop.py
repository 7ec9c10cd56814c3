"""Steps a second of ftrain's loop, with everything switched on, against a bare jit loop over the same batches.

    python benchmarks/loop.py             # all jobs
    python benchmarks/loop.py tiny mlp    # some of them

Switched on: a log line and summaries every 100 steps, a NaN guard on every step, a step counter, and one checkpoint in
each round. The bare loop is what one writes by hand: a donated jit call for each step, over batches that were made
beforehand, and nothing else. Both run in one process and take turns in rounds, because the machine's speed drifts; the
ratio is the median over the rounds. The job `mesh` runs in a process of its own with four virtual devices, `keras` if
Keras 3 is installed (pip install keras).
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICES = 4
if "mesh" in sys.argv[1:]:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={DEVICES}"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ftrain

EXAMPLES, FEATURES, CLASSES = 8192, 64, 10


@dataclass(frozen=True)
class Job:
    """A model, its batch, and how many steps a round has."""

    init: Callable[[], Any]
    loss_fn: Callable[..., Any]
    batch_size: int
    steps: int
    optimizer: str = "sgd"
    devices: int = 1


def mlp(*widths: int) -> tuple[Callable[[], Any], Callable[..., Any]]:
    sizes = [FEATURES, *widths, CLASSES]

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), len(sizes))
        shapes = itertools.pairwise(sizes)
        return [
            {"w": jax.random.normal(key, shape) * shape[0] ** -0.5, "b": jnp.zeros(shape[1])}
            for key, shape in zip(keys, shapes, strict=False)
        ]

    def loss_fn(params, batch, rng):
        hidden = batch["x"]
        for layer in params[:-1]:
            hidden = jax.nn.relu(hidden @ layer["w"] + layer["b"])
        logits = hidden @ params[-1]["w"] + params[-1]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return init, loss_fn


def many_leaves(count: int) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """A sum of many small products: the time goes to handling leaves."""

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), count // 2)
        return [{"w": jax.random.normal(key, (FEATURES,)) * 0.1, "b": jnp.zeros(())} for key in keys]

    def loss_fn(params, batch, rng):
        weights = jnp.stack([layer["w"] for layer in params])
        offsets = jnp.stack([layer["b"] for layer in params])
        return jnp.mean((jnp.tanh(batch["x"] @ weights.T + offsets).mean(axis=-1) - batch["y"]) ** 2)

    return init, loss_fn


JOBS = {
    "mlp": Job(*mlp(128), batch_size=128, steps=10_000),
    "tiny": Job(*mlp(16), batch_size=32, steps=40_000),
    "long": Job(*mlp(640, 640), batch_size=512, steps=200),
    "leaves": Job(*many_leaves(1000), batch_size=32, steps=200, optimizer="adam"),
    "mesh": Job(*mlp(128), batch_size=128, steps=1000, devices=DEVICES),
}
ABOUT = {
    "mlp": "MLP 64-128-10, batch 128",
    "tiny": "MLP 64-16-10, batch 32",
    "long": "MLP 64-640-640-10, batch 512",
    "leaves": "1,000 leaves, Adam",
    "mesh": "MLP 64-128-10 on 4 virtual devices",
}


def make_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, EXAMPLES).astype(np.int32)}


class BareLoop:
    """What one writes by hand."""

    def __init__(self, job: Job, ready: list[Any]):
        optimizer = optax.sgd(0.01, momentum=0.9) if job.optimizer == "sgd" else optax.adam(1e-3)

        def step(params, opt_state, batch):
            loss, gradients = jax.value_and_grad(job.loss_fn)(params, batch, None)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        self.params = job.init()
        self.opt_state = optimizer.init(self.params)
        shardings = {}
        if job.devices > 1:
            mesh = jax.make_mesh((job.devices,), ("data",))
            split = jax.NamedSharding(mesh, jax.P("data"))
            whole = jax.NamedSharding(mesh, jax.P())
            self.params, self.opt_state = jax.device_put((self.params, self.opt_state), whole)
            shardings = {"in_shardings": (whole, whole, split), "out_shardings": whole}
        self.compiled = jax.jit(step, donate_argnums=(0, 1), **shardings)
        self.batches = itertools.cycle(ready)
        self.window = 8 if job.devices > 1 else 0  # without one, virtual devices deadlock

    def run(self, steps: int) -> float:
        start = time.perf_counter()
        losses: list[Any] = []
        for _ in range(steps):
            self.params, self.opt_state, loss = self.compiled(self.params, self.opt_state, next(self.batches))
            if self.window:
                losses.append(loss)
                if len(losses) > self.window:
                    losses.pop(0).block_until_ready()
        loss.block_until_ready()
        return steps / (time.perf_counter() - start)


class FtrainLoop:
    """ftrain with everything switched on; each round ends with a checkpoint's step, so each has one of them."""

    def __init__(self, job: Job, arrays: dict[str, np.ndarray], directory: str, fuse: Any = "auto"):
        hooks = ftrain.hooks
        optimizers = ftrain.optimizers
        optimizer = optimizers.momentum(0.01, 0.9) if job.optimizer == "sgd" else optimizers.adam(1e-3)
        step = ftrain.make_step(job.loss_fn, optimizer)
        pipeline = ftrain.data.Pipeline(ftrain.data.ArraySource(arrays), batch_size=job.batch_size)
        self.notices: list[str] = []
        self.loop = ftrain.Run(
            step,
            ftrain.TrainState.create(job.init(), optimizer),
            pipeline,
            directory=directory,
            hooks=[
                hooks.Logging(write=self.notices.append, when=ftrain.every(steps=100)),
                hooks.SummarySaver(directory, when=ftrain.every(steps=100)),
                hooks.CheckpointSaver(Path(directory) / "checkpoints", when=ftrain.every(steps=job.steps)),
            ],
            mesh=ftrain.cluster.make_mesh(job.devices),
            fuse=fuse,
        )

    def run(self, steps: int) -> float:
        taken, start = self.loop.steps_taken, time.perf_counter()
        while self.loop.steps_taken < taken + steps:
            self.loop.advance()
        jax.block_until_ready(self.loop.state)
        return (self.loop.steps_taken - taken) / (time.perf_counter() - start)


def compare(name: str, rounds: int) -> str:
    job, arrays = JOBS[name], make_arrays()
    pipeline = ftrain.data.Pipeline(ftrain.data.ArraySource(arrays), batch_size=job.batch_size)
    ready = [pipeline.batch(step) for step in range(64)]
    with tempfile.TemporaryDirectory() as directory:
        bare, ours = BareLoop(job, ready), FtrainLoop(job, arrays, directory)
        with ours.loop:
            bare.run(min(job.steps, 500))
            ours.run(job.steps)  # until fusing is settled
            pairs = [(bare.run(job.steps), ours.run(job.steps)) for _ in range(rounds)]
            ours.loop.request_stop("done")
        fused = next((line for line in ours.notices if "fused" in line), "steps are not fused")
    speeds = [statistics.median(pair[i] for pair in pairs) for i in (0, 1)]
    ratio = statistics.median(own / other for other, own in pairs)
    return f"{ABOUT[name]:<36}{speeds[0]:>10,.0f}{speeds[1]:>10,.0f}{ratio:>8.2f}   {fused}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    for name in arguments.jobs:
        if name not in JOBS:
            parser.error(f"there is no job {name}; there are {', '.join(JOBS)}")
    print(f"{'steps a second':<36}{'bare':>10}{'ftrain':>10}{'ratio':>8}", flush=True)
    for name in arguments.jobs or JOBS:
        print(compare(name, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
