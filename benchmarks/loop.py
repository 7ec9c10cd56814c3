"""Steps per second of ftrain's loop, compared with a bare jit loop over the same batches.

    python benchmarks/loop.py             # all jobs
    python benchmarks/loop.py tiny mlp    # only these

The run has a log line and summaries every 100 steps, a NaN guard on every step, a step counter, and
one checkpoint in the middle. The bare loop is the same job written by hand: one donated jit call
per step over batches made beforehand, and nothing else. Both run in one process and alternate in
rounds, because the machine's speed drifts; speeds and ratio are those of all rounds together. The
job `mesh` runs in a separate process with four virtual devices. If Keras 3 is installed (pip
install '.[bench]'), it runs on JAX for the first two jobs. `memory` shows how a separate process
grows over 200,000 steps, and `start` the time from `ftrain train configs/digits.toml` to its first
step.
"""

import argparse
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICES = 4
if "--here" in sys.argv:  # before jax is imported
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={DEVICES}"
    )

import jax  # noqa: E402 - after XLA_FLAGS
import jax.numpy as jnp  # noqa: E402 - after XLA_FLAGS
import numpy as np  # noqa: E402 - after XLA_FLAGS
import optax  # noqa: E402 - after XLA_FLAGS

import ftrain  # noqa: E402 - after XLA_FLAGS

EXAMPLES = 8192
FEATURES = 64
CLASSES = 10


@dataclass(frozen=True)
class Job:
    """A model, its batch size, and the steps of a round."""

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
    """Return a model of many small products, which spends its time on handling leaves."""

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), count // 2)
        return [
            {"w": jax.random.normal(key, (FEATURES,)) * 0.1, "b": jnp.zeros(())} for key in keys
        ]

    def loss_fn(params, batch, rng):
        weights = jnp.stack([layer["w"] for layer in params])
        offsets = jnp.stack([layer["b"] for layer in params])
        return jnp.mean(
            (jnp.tanh(batch["x"] @ weights.T + offsets).mean(axis=-1) - batch["y"]) ** 2
        )

    return init, loss_fn


JOBS = {
    "mlp": Job(*mlp(128), batch_size=128, steps=10_000),
    "tiny": Job(*mlp(16), batch_size=32, steps=40_000),
    "long": Job(*mlp(384, 384), batch_size=1024, steps=400),
    "leaves": Job(*many_leaves(1000), batch_size=32, steps=200, optimizer="adam"),
    "mesh": Job(*mlp(128), batch_size=128, steps=1000, devices=DEVICES),
}
WITH_KERAS = ("mlp", "tiny")
ABOUT = {
    "mlp": "MLP 64-128-10, batch 128",
    "tiny": "MLP 64-16-10, batch 32",
    "long": "MLP 64-384-384-10, batch 1024",
    "leaves": "1,000 leaves, Adam",
    "mesh": "MLP 64-128-10 on 4 virtual devices",
}


def make_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, EXAMPLES).astype(np.int32)}


class BareLoop:
    """A loop written by hand."""

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
        self.window = 8 if job.devices > 1 else 0  # without a limit, virtual devices deadlock

    def run(self, steps: int) -> float:
        start = time.perf_counter()
        losses: list[Any] = []
        for _ in range(steps):
            self.params, self.opt_state, loss = self.compiled(
                self.params, self.opt_state, next(self.batches)
            )
            if self.window:
                losses.append(loss)
                if len(losses) > self.window:
                    losses.pop(0).block_until_ready()
        loss.block_until_ready()
        return steps / (time.perf_counter() - start)


class FtrainLoop:
    """ftrain with all default hooks, summaries, and a checkpoint after step `save_at`."""

    def __init__(
        self,
        job: Job,
        arrays: dict[str, np.ndarray],
        directory: str,
        save_at: int = 0,
        fuse: Any = "auto",
    ):
        hooks = ftrain.hooks
        optimizers = ftrain.optimizers
        optimizer = (
            optimizers.momentum(0.01, 0.9) if job.optimizer == "sgd" else optimizers.adam(1e-3)
        )
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
                hooks.CheckpointSaver(
                    Path(directory) / "checkpoints", when=ftrain.training.at(save_at)
                ),
            ],
            mesh=ftrain.cluster.make_mesh(job.devices),
            fuse=fuse,
        )

    def run(self, steps: int) -> float:
        taken = self.loop.steps_taken
        start = time.perf_counter()
        while self.loop.steps_taken < taken + steps:
            self.loop.advance()
        jax.block_until_ready(self.loop.state)
        return (self.loop.steps_taken - taken) / (time.perf_counter() - start)


class KerasLoop:
    """Keras 3 on JAX: `fit` without a progress bar or callbacks."""

    def __init__(self, job: Job, arrays: dict[str, np.ndarray]):
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        widths = [leaf["b"].shape[0] for leaf in job.init()]
        layers = [keras.layers.Dense(width, activation="relu") for width in widths[:-1]]
        self.model = keras.Sequential(
            [keras.Input((FEATURES,)), *layers, keras.layers.Dense(widths[-1])]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss=loss)
        self.arrays = arrays
        self.batch_size = job.batch_size

    def run(self, steps: int) -> float:
        epochs = max(1, steps * self.batch_size // EXAMPLES)
        start = time.perf_counter()
        self.model.fit(
            self.arrays["x"], self.arrays["y"], batch_size=self.batch_size, epochs=epochs, verbose=0
        )
        return epochs * EXAMPLES / self.batch_size / (time.perf_counter() - start)


def compare(name: str, rounds: int) -> str:
    job = JOBS[name]
    arrays = make_arrays()
    pipeline = ftrain.data.Pipeline(ftrain.data.ArraySource(arrays), batch_size=job.batch_size)
    ready = [pipeline.batch(step) for step in range(64)]
    keras = (
        KerasLoop(job, arrays) if name in WITH_KERAS and importlib.util.find_spec("keras") else None
    )
    with tempfile.TemporaryDirectory() as directory:
        middle = job.steps * (1 + rounds // 2) + job.steps // 2
        bare = BareLoop(job, ready)
        ours = FtrainLoop(job, arrays, directory, save_at=middle)
        loops = {"bare": bare.run, "ftrain": ours.run} | ({"keras": keras.run} if keras else {})
        with ours.loop:
            for run in loops.values():
                run(job.steps)  # until all is compiled and step fusion is decided
            speeds = [{each: run(job.steps) for each, run in loops.items()} for _ in range(rounds)]
            ours.loop.request_stop("done")
        assert (Path(directory) / "checkpoints" / str(middle)).exists()
        fused = next((line for line in ours.notices if "fused" in line), "steps are not fused")
    # The harmonic mean is all steps of a loop divided by all of its time.
    means = {each: statistics.harmonic_mean(row[each] for row in speeds) for each in loops}
    columns = [means["bare"], means["ftrain"]]
    shown = f"{means['keras'] / means['bare']:>8.2f}" if keras else f"{'':>8}"
    ratio = means["ftrain"] / means["bare"]
    return (
        f"{ABOUT[name]:<36}"
        + "".join(f"{each:>10,.0f}" for each in columns)
        + f"{ratio:>8.2f}{shown}   {fused}"
    )


def measure_memory(steps: int = 200_000) -> str:
    """Return the size of the process after each tenth of a long run."""
    with tempfile.TemporaryDirectory() as directory:
        ours = FtrainLoop(JOBS["tiny"], make_arrays(), directory, save_at=steps // 4)
        sizes = []
        with ours.loop:
            for _ in range(10):
                ours.run(steps // 10)
                ours.notices.clear()
                sizes.append(resident_megabytes())
            ours.loop.request_stop("done")
    shown = ", ".join(f"{size:.0f}" for size in sizes)
    return f"memory over {steps:,} steps, MB after each tenth: {shown}"


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure_start(times: int = 5) -> str:
    """Return the seconds from the command to its first step; an unmeasured run fills the cache."""
    command = [sys.executable, "-m", "ftrain", "train", "configs/digits.toml", "steps=1"]
    seconds = []
    for _ in range(times + 1):
        with tempfile.TemporaryDirectory() as directory:
            started = time.perf_counter()
            process = subprocess.Popen(
                [*command, f"run.directory={directory}/run"], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("first step after"):
                    seconds.append(time.perf_counter() - started)
            process.wait()
    return f"start to first step, warm cache, s: {', '.join(f'{each:.2f}' for each in seconds[1:])}"


def in_own_process(name: str, rounds: int) -> str:
    """Run a job in a new process, for another number of devices or for unused memory."""
    command = [sys.executable, __file__, name, "--rounds", str(rounds), "--here"]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*JOBS, "memory", "start"]
    parser.add_argument(
        "jobs", nargs="*", metavar="JOB", help=f"one of {', '.join(names)}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in arguments.jobs:
        if name not in names:
            parser.error(f"unknown job {name}; expected one of {', '.join(names)}")
    print(f"{'steps per second':<36}{'bare':>10}{'ftrain':>10}{'ratio':>8}{'keras':>8}", flush=True)
    for name in arguments.jobs or names:
        if name == "memory" and arguments.here:
            line = measure_memory()
        elif name == "memory":
            line = in_own_process(name, arguments.rounds)
        elif name == "start":
            line = measure_start()
        elif JOBS[name].devices > 1 and not arguments.here:
            line = in_own_process(name, arguments.rounds)
        else:
            line = compare(name, arguments.rounds)
        print(line, flush=True)


if __name__ == "__main__":
    main()
