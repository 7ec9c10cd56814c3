"""One process of benchmarks/cluster.py: it trains, alone or in a group, and prints measurements.

    python benchmarks/cluster_program.py speed mlp --rounds 20 --fuse auto
    python benchmarks/cluster_program.py memory

The environment sets which process it is (FTRAIN_CLUSTER) and how many devices it has (XLA_FLAGS).
The first process prints the result as a line of JSON.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from loop import make_arrays, mlp

import ftrain
from ftrain.cluster import (
    ProcessGroup,
    Sharding,
    batch_shard,
    connect,
    create_local,
    make_mesh,
    membership,
)
from ftrain.tasks.source_lm import init_transformer, transformer_logits
from ftrain.training import Fuse

WARM_UP = 3  # unmeasured rounds, until all is compiled and step fusion is decided
IN_FLIGHT = 8  # calls; without a limit, virtual devices deadlock
READY = 64  # batches, which the bare loop repeats


@dataclass(frozen=True)
class Job:
    """The widths of a model, its batch size, and the steps of a round."""

    widths: tuple[int, ...]
    batch_size: int
    steps: int


# Rounds are short, so that other load on the machine affects both loops alike.
JOBS = {"mlp": Job((128,), 128, steps=200), "wide": Job((1024, 1024), 512, steps=50)}


class BareLoop:
    """A loop written by hand: one donated jit call per step, with a numpy batch put on the mesh."""

    def __init__(self, job: Job, mesh: jax.sharding.Mesh, pipeline: ftrain.data.Pipeline):
        init, loss_fn = mlp(*job.widths)
        optimizer = optax.sgd(0.01, momentum=0.9)

        def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
            loss, gradients = jax.value_and_grad(loss_fn)(params, batch, None)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        whole = jax.NamedSharding(mesh, jax.P())
        split = jax.NamedSharding(mesh, jax.P("data"))
        self.params = jax.jit(init, out_shardings=whole)()
        self.opt_state = jax.jit(optimizer.init, out_shardings=whole)(self.params)
        self.compiled = jax.jit(
            step,
            donate_argnums=(0, 1),
            in_shardings=(whole, whole, split),
            out_shardings=(whole, whole, whole),
        )
        self.batches = itertools.cycle([pipeline.batch(step) for step in range(READY)])
        self.put = partial(jax.make_array_from_process_local_data, split)

    def run(self, steps: int) -> None:
        losses: deque[jax.Array] = deque()
        for _ in range(steps):
            batch = jax.tree.map(self.put, next(self.batches))
            self.params, self.opt_state, loss = self.compiled(self.params, self.opt_state, batch)
            losses.append(loss)
            if len(losses) > IN_FLIGHT:
                losses.popleft().block_until_ready()
        jax.block_until_ready(self.params)


class FtrainLoop:
    """ftrain with all default hooks, summaries, and a checkpoint after step `save_at`."""

    def __init__(
        self,
        job: Job,
        mesh: jax.sharding.Mesh,
        pipeline: ftrain.data.Pipeline,
        group: ProcessGroup,
        directory: Path,
        save_at: int,
        fuse: Fuse,
    ):
        init, loss_fn = mlp(*job.widths)
        optimizer = ftrain.optimizers.momentum(0.01, 0.9)
        whole = jax.NamedSharding(mesh, jax.P())
        self.notices: list[str] = []
        self.target = 0  # steps of all rounds so far
        self.loop = ftrain.Run(
            ftrain.make_step(loss_fn, optimizer),
            jax.jit(lambda: ftrain.TrainState.create(init(), optimizer), out_shardings=whole),
            pipeline,
            directory=directory,
            hooks=[
                ftrain.hooks.Logging(write=self.notices.append, when=ftrain.every(steps=100)),
                ftrain.hooks.SummarySaver(directory, when=ftrain.every(steps=100)),
                ftrain.hooks.CheckpointSaver(
                    directory / "checkpoints", when=ftrain.training.at(save_at)
                ),
            ],
            mesh=mesh,
            fuse=fuse,
            group=group,
        )

    def run(self, steps: int) -> None:
        # A fused call may take more steps than are left of a round; the next round then has fewer.
        self.target += steps
        while self.loop.steps_taken < self.target:
            self.loop.advance()
        jax.block_until_ready(self.loop.state)


def measure_speed(
    group: ProcessGroup, job: Job, rounds: int, fuse: Fuse, directory: Path
) -> dict[str, Any]:
    """Run both loops in turns; return the seconds of every round and the CPU time of each loop."""
    mesh = make_mesh()
    index, count = batch_shard(mesh)
    source = ftrain.data.ArraySource(make_arrays())
    pipeline = ftrain.data.Pipeline(
        source, batch_size=job.batch_size, shard_index=index, shard_count=count
    )
    # in the middle of the run, and of a round
    save_at = job.steps * (WARM_UP + rounds // 2) + job.steps // 2
    bare = BareLoop(job, mesh, pipeline)
    ours = FtrainLoop(job, mesh, pipeline, group, directory, save_at, fuse)
    loops: dict[str, Callable[[int], None]] = {"bare": bare.run, "ftrain": ours.run}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    computing = dict.fromkeys(loops, 0.0)
    saving = 0.0
    with ours.loop:
        for run in loops.values():
            run(WARM_UP * job.steps)
        for number in range(rounds):
            for name in loops if number % 2 else reversed(loops):
                group.barrier(f"round {number} of {name}")
                started = time.perf_counter()
                computed = time.process_time()
                loops[name](job.steps)
                seconds[name].append(time.perf_counter() - started)
                computing[name] += time.process_time() - computed
        # Read before the end of the run, which saves again.
        saving = ours.loop.timing.others.get("CheckpointSaver", 0.0)
        ours.loop.request_stop("done")
    if not (directory / "checkpoints" / str(save_at)).exists():
        raise RuntimeError(f"{directory}: the checkpoint of step {save_at} is missing")
    fused = next(
        (line.partition(",")[0] for line in ours.notices if "are fused" in line),
        "steps are not fused",
    )
    return {
        "steps": job.steps,
        "seconds": seconds,
        "computing": computing,
        "saving": saving,
        "fused": fused,
    }


def measure_memory(width: int = 384, layers: int = 4, context: int = 32) -> dict[str, Any]:
    """Take two steps of a transformer with fsdp; return the bytes of its state on each device."""
    optimizer = ftrain.optimizers.adam(1e-3)
    params = init_transformer(jax.random.key(0), vocabulary=256, width=width, layers=layers)

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        tokens = batch["tokens"]
        logits = transformer_logits(params, tokens[:, :-1], heads=4)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = np.random.default_rng(0).integers(0, 256, (64, context + 1)).astype(np.int32)
    loop = ftrain.training.Loop(
        ftrain.make_step(loss_fn, optimizer),
        ftrain.TrainState.create(params, optimizer),
        ftrain.data.Pipeline(ftrain.data.ArraySource({"tokens": tokens}), batch_size=8),
        mesh=make_mesh(data=1, fsdp=-1),
        sharding=Sharding(),
        fuse=1,
    )
    with loop:
        for _ in range(2):
            loop.step()
        loop.request_stop("done")
    return weigh(loop.state) | {"parameters": ftrain.tree.count_elements(loop.state.params)}


def weigh(state: ftrain.TrainState) -> dict[str, Any]:
    """Return the bytes of the state, of its replicated leaves, and of its part on each device."""
    arrays = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(state)
    ]
    held = dict.fromkeys(jax.devices(), 0)
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return {
        "whole": sum(array.nbytes for array in arrays),
        "replicated": sum(array.nbytes for array in arrays if array.is_fully_replicated),
        "held": list(held.values()),
    }


def join() -> ProcessGroup:
    member = membership()
    return create_local() if member is None else connect(member.spec, member.job, member.index)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "memory"])
    parser.add_argument("job", nargs="?", choices=JOBS, default="mlp")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--fuse", type=lambda text: text if text == "auto" else int(text), default="auto"
    )
    parser.add_argument(
        "--directory", type=Path, help="run directory that all processes share; default: temporary"
    )
    arguments = parser.parse_args()
    with join() as group, tempfile.TemporaryDirectory() as alone:
        if arguments.what == "memory":
            result = measure_memory()
        else:
            directory = arguments.directory or Path(alone)
            fuse = cast("Fuse", arguments.fuse)
            result = measure_speed(group, JOBS[arguments.job], arguments.rounds, fuse, directory)
        if group.is_chief:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
