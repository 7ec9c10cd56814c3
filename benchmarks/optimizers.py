"""Optimizers compared with optax, as ratios from one run.

    python benchmarks/optimizers.py [leaves] [rows] [duplicates] [accumulation]

- leaves: Adam over many small leaves, compared with `optax.adam` in the same bare loop, and the
  time of the first call. The floor is a step that only adds one to every leaf: the cost of calling
  a function with so many arrays.
- rows: a step that reads 1,024 rows of a table, for tables of four sizes, compared with
  `optax.adam` on the whole table; and the memory that the step needs in addition to the table and
  its slots. Each step reads different rows. A small table stays in the processor's caches, a large
  one does not; "same ids" is the ratio without this effect.
- duplicates: the same with 16,384 ids, half of which are repeats.
- accumulation: the memory of 16 microbatches compared with that of one.

The variants alternate in short rounds, because the machine's speed drifts. A time is the median
over the rounds, and a ratio is the median of the ratios of the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ftrain import gradients, optimizers

WIDTH = 64
SIZES = (10_000, 100_000, 1_000_000, 4_000_000)
LAZY = {
    "adam": lambda: optimizers.adam(0.001),
    "adagrad": lambda: optimizers.adagrad(0.01),
    "ftrl": lambda: optimizers.ftrl(0.01),
}
Step = Callable[..., tuple[Any, Any]]


class Contestant:
    """A compiled step with its own state, which runs a few steps at a time."""

    def __init__(self, step: Step, params: Any, state: Any, inputs: list[tuple[Any, ...]]):
        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._inputs = inputs
        self._carried = (params, state)
        self._taken = 0
        start = time.perf_counter()
        self.run(1)
        self.first_call = time.perf_counter() - start

    def run(self, steps: int) -> float:
        """Take these steps; return the seconds per step."""
        start = time.perf_counter()
        for _ in range(steps):
            self._carried = self._step(
                *self._carried, *self._inputs[self._taken % len(self._inputs)]
            )
            self._taken += 1
        jax.block_until_ready(self._carried[0])
        return (time.perf_counter() - start) / steps


def take_turns(
    contestants: dict[Any, Contestant], steps: int, rounds: int
) -> list[dict[Any, float]]:
    for contestant in contestants.values():
        contestant.run(2)
    return [
        {name: contestant.run(steps) for name, contestant in contestants.items()}
        for _ in range(rounds)
    ]


def median(times: list[dict[Any, float]], name: Any, of: Any = None) -> float:
    return statistics.median(each[name] / (1.0 if of is None else each[of]) for each in times)


def compare_leaves() -> None:
    times_header = f"{'leaves':>7}{'optax':>12}{'ftrain':>12}{'floor':>12}"
    print(f"{times_header}{'ratio':>8}{'of floor':>10}{'first call':>12}")
    for count in (10, 100, 1000):
        params = {f"layer{n:04}": jnp.ones((16, 16) if n % 2 else 16) for n in range(count)}
        chosen = {"optax": optax.adam(0.001), "ftrain": optimizers.adam(0.001)}
        contestants = {
            name: Contestant(bare_step(of), *fresh(params, of), [()]) for name, of in chosen.items()
        }
        contestants["floor"] = Contestant(
            lambda p, s: (jax.tree.map(lambda leaf: leaf + 1, p), s), *fresh(params), [()]
        )
        times = take_turns(contestants, steps=max(2, 1000 // count), rounds=40)
        shown = "".join(f"{median(times, name) * 1e6:>9,.0f} us" for name in contestants)
        first = contestants["ftrain"].first_call / contestants["optax"].first_call
        ratio = median(times, "ftrain", "optax")
        floor = median(times, "floor", "optax")
        print(f"{count:>7}{shown}{ratio:>8.2f}{floor:>10.2f}{first:>12.2f}")


def bare_step(optimizer: optax.GradientTransformation) -> Step:
    def step(params, state):
        updates, state = optimizer.update(
            jax.tree.map(lambda leaf: 0.1 * leaf, params), state, params
        )
        return optax.apply_updates(params, updates), state

    return step


def fresh(params: Any, optimizer: optax.GradientTransformation | None = None) -> tuple[Any, Any]:
    """Return a copy of the parameters that may be donated, and the state of their optimizer."""
    copied = jax.tree.map(jnp.copy, params)
    return copied, (optimizer or optax.identity()).init(copied)


def loss_fn(params, ids):
    """As cheap as possible, so that the table takes most of the time."""
    return jnp.mean(gradients.lookup(params["table"], ids) @ params["weights"])


def rows_step(optimizer: optax.GradientTransformation) -> Step:
    def step(params, state, ids):
        _, found = gradients.value_and_grad(loss_fn)(params, ids)
        updates, state = optimizer.update(found, state, params)
        return optimizers.apply_updates(params, updates), state

    return step


def dense_step(optimizer: optax.GradientTransformation) -> Step:
    def step(params, state, ids):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, ids), state, params)
        return optax.apply_updates(params, updates), state

    return step


def table_of(rows: int) -> dict[str, jax.Array]:
    return {"table": jnp.full((rows, WIDTH), 0.01), "weights": jnp.linspace(-1, 1, WIDTH)}


def batches(rows: int, ids: int, repeated: int = 0) -> list[tuple[jax.Array]]:
    """Return 16 batches of ids, of which `repeated` are repeats of the others."""

    def draw() -> Iterator[tuple[jax.Array]]:
        rng = np.random.default_rng(0)
        for _ in range(16):
            first = rng.choice(rows, ids - repeated, replace=False)
            yield (
                jnp.asarray(
                    rng.permutation(np.concatenate([first, rng.choice(first, repeated)])), jnp.int32
                ),
            )

    return list(draw())


def compare_rows(ids: int = 1024) -> None:
    heading = "".join(f"{f'{rows:,}':>12}" for rows in SIZES)
    print(f"{'rows':>12}{heading}{'4e6 : 1e4':>12}{'(same ids)':>12}{'dense : rows':>14}")
    dense_times = measure_dense(ids)
    for name, make in LAZY.items():
        times = time_rows(make, SIZES, lambda rows: batches(rows, ids))
        again = time_rows(make, (SIZES[0], SIZES[-1]), lambda rows: batches(rows, ids)[:1])
        shown = "".join(f"{median(times, rows) * 1e3:>9.2f} ms" for rows in SIZES)
        growth = "".join(f"{median(each, SIZES[-1], SIZES[0]):>12.2f}" for each in (times, again))
        print(f"{name:>12}{shown}{growth}{dense_times[-1] / median(times, SIZES[-1]):>14,.0f}")
        print(
            f"{'memory':>12}"
            + "".join(f"{extra_memory(rows, make(), ids) / 2**20:>9.2f} MB" for rows in SIZES)
        )
    print(f"{'optax.adam':>12}" + "".join(f"{seconds * 1e3:>9.2f} ms" for seconds in dense_times))


def time_rows(make: Any, sizes: tuple[int, ...], ids_of: Any) -> list[dict[Any, float]]:
    contestants = {
        rows: Contestant(rows_step(make()), *started(rows, make()), ids_of(rows)) for rows in sizes
    }
    return take_turns(contestants, steps=20, rounds=30)


def started(rows: int, optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
    params = table_of(rows)
    return params, optimizer.init(params)


def measure_dense(ids: int) -> list[float]:
    """Return the seconds per step of `optax.adam` on whole tables, one by one to save memory."""
    return [
        statistics.median(one[0] for one in take_turns({0: contestant}, steps=1, rounds=5))
        for rows in SIZES
        for contestant in [
            Contestant(
                dense_step(optax.adam(0.001)), *started(rows, optax.adam(0.001)), batches(rows, ids)
            )
        ]
    ]


def extra_memory(rows: int, optimizer: optax.GradientTransformation, ids: int) -> int:
    """Return the bytes that a step needs in addition to its arguments."""
    shapes = jax.eval_shape(lambda: started(rows, optimizer))
    return memory_of(
        jax.jit(rows_step(optimizer), donate_argnums=(0, 1)),
        *shapes,
        jax.ShapeDtypeStruct((ids,), "int32"),
    )


def memory_of(function: Any, *arguments: Any) -> int:
    """Return the bytes that XLA plans for a function in addition to its arguments."""
    plan: Any = function.lower(*arguments).compile().memory_analysis()
    return plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes


def compare_duplicates(ids: int = 16_384) -> None:
    sizes = SIZES[:3]
    print(f"{'rows':>12}" + "".join(f"{f'{rows:,}':>12}" for rows in sizes))
    for name, make in LAZY.items():
        times = time_rows(make, sizes, lambda rows: batches(rows, ids, repeated=ids // 2))
        print(f"{name:>12}" + "".join(f"{median(times, rows) * 1e3:>9.2f} ms" for rows in sizes))


def compare_accumulation(microbatches: int = 16, examples: int = 1024, layers: int = 8) -> None:
    params = {"w": [jnp.eye(256) for _ in range(layers)]}

    def deep_loss(params, batch):
        hidden = batch["x"]
        for weight in params["w"]:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean(hidden**2)

    def memory(parts: int, examples: int) -> int:
        step = jax.jit(gradients.accumulate(gradients.value_and_grad(deep_loss), parts))
        return memory_of(step, params, {"x": jax.ShapeDtypeStruct((examples, 256), jnp.float32)})

    all_examples = examples * microbatches
    one = memory(1, examples)
    parts = memory(microbatches, all_examples)
    whole = memory(1, all_examples)
    print(f"memory of a batch of {examples}: {one / 2**20:.2f} MB")
    for name, size in (
        (f"{microbatches} such microbatches", parts),
        (f"a batch of {all_examples}", whole),
    ):
        print(f"of {name}: {size / 2**20:.2f} MB, {size / one:.2f} times as much")


BENCHMARKS = {
    "leaves": compare_leaves,
    "rows": compare_rows,
    "duplicates": compare_duplicates,
    "accumulation": compare_accumulation,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", metavar="|".join(BENCHMARKS), help="default: all")
    chosen = parser.parse_args().which or list(BENCHMARKS)
    for name in chosen:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name}; expected one of {', '.join(BENCHMARKS)}")
    for name in chosen:
        print(f"\n{name}")
        BENCHMARKS[name]()


if __name__ == "__main__":
    main()
