"""Steps a second of ftrain's loop with its default hooks, against bare jit loops over the same job.

    python benchmarks/loop.py

The job: an MLP 64-128-10, batch 128, momentum. All loops run in one process and take turns in short rounds, because the
machine's speed drifts; the ratios are what counts. Bare (ready) cycles through batches made beforehand, which no real
run can; bare (indexed) makes each batch from a permutation as it goes, as a hand-written script would.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ftrain

EXAMPLES, FEATURES, HIDDEN, CLASSES, BATCH = 8192, 64, 128, 10, 128


def init_params() -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(first, (FEATURES, HIDDEN)) * 0.1,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(second, (HIDDEN, CLASSES)) * 0.1,
        "b2": jnp.zeros(CLASSES),
    }


def loss_fn(params, batch, rng):
    hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def make_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, EXAMPLES).astype(np.int32)}


def bare_loop(batches: Callable[[], Iterator[Any]]) -> Callable[[int], float]:
    optimizer = optax.sgd(0.01, momentum=0.9)

    def step(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch, None)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1))

    def run(steps: int) -> float:
        params = init_params()
        opt_state = optimizer.init(params)
        stream = batches()
        params, opt_state, loss = compiled(params, opt_state, next(stream))
        loss.block_until_ready()
        start = time.perf_counter()
        for _ in range(steps):
            params, opt_state, loss = compiled(params, opt_state, next(stream))
        loss.block_until_ready()
        return steps / (time.perf_counter() - start)

    return run


def ftrain_loop(arrays: dict[str, np.ndarray]) -> Callable[[int], float]:
    optimizer = ftrain.optimizers.momentum(0.01, 0.9)
    step = ftrain.make_step(loss_fn, optimizer)

    def run(steps: int) -> float:
        pipeline = ftrain.data.Pipeline(ftrain.data.ArraySource(arrays), batch_size=BATCH)
        state = ftrain.TrainState.create(init_params(), optimizer)
        logging = ftrain.hooks.Logging(write=lambda line: None)
        with (
            tempfile.TemporaryDirectory() as directory,
            ftrain.Run(step, state, pipeline, directory=directory, hooks=[logging]) as run,
        ):
            run.step()
            jax.block_until_ready(run.state)
            start = time.perf_counter()
            for _ in range(steps):
                run.step()
            jax.block_until_ready(run.state)
            elapsed = time.perf_counter() - start
        return steps / elapsed

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()

    arrays = make_arrays()
    pipeline = ftrain.data.Pipeline(ftrain.data.ArraySource(arrays), batch_size=BATCH)
    ready = [pipeline.batch(step) for step in range(64)]
    loops = {
        "bare (ready)": bare_loop(lambda: itertools.cycle(ready)),
        "bare (indexed)": bare_loop(lambda: map(pipeline.batch, itertools.count())),
        "ftrain": ftrain_loop(arrays),
    }
    for run in loops.values():
        run(100)
    rounds = [{name: run(arguments.steps) for name, run in loops.items()} for _ in range(arguments.rounds)]
    bare = ("bare (ready)", "bare (indexed)")
    print(f"{'loop':<16}{'steps/s':>10}{'of ready':>10}{'of indexed':>12}")
    for name in loops:
        speed = statistics.median(each[name] for each in rounds)
        ratios = [statistics.median(each[name] / each[other] for each in rounds) for other in bare]
        print(f"{name:<16}{speed:>10,.0f}{ratios[0]:>10.2f}{ratios[1]:>12.2f}")


if __name__ == "__main__":
    main()
