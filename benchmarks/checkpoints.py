"""Save and restore checkpoints, compared with plain Orbax in the same process.

    python benchmarks/checkpoints.py [--rounds 6]

Measured are the time for which a save blocks training ("blocked"), the time until the checkpoint
is complete ("total", for ftrain with the manifest and all digests), and the time of a restore,
verified and unverified. A ratio is ftrain's median over the rounds divided by that of Orbax v1's
`save_async` or `load`; below 1 is faster than Orbax. "next step" is the time of the donated step
right after a save: it cannot overwrite the buffers that are being saved, so it allocates new ones.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from ftrain.checkpoints import CheckpointManager

TREES = {
    "100 MB in 100 leaves": (100, 100),
    "100 MB in 1,000 leaves": (1000, 100),
    "1 GB in 100 leaves": (100, 1024),
}


def make_tree(leaves: int, megabytes: int):
    rng = np.random.default_rng(0)
    size = megabytes * 2**18 // leaves
    return {
        f"leaf_{n}": jnp.asarray(rng.standard_normal(size, dtype=np.float32)) for n in range(leaves)
    }


advance = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.999, tree), donate_argnums=0)


def seconds(work):
    start = time.perf_counter()
    jax.block_until_ready(result := work())
    return time.perf_counter() - start, result


def one_round(tree, home: Path, times, number: int):
    """Save and restore once with each library, in alternating order; train the tree in between."""
    ways = [with_orbax, with_ftrain]
    for way in ways if number % 2 else reversed(ways):
        spent, tree = seconds(lambda: advance(tree))  # noqa: B023 - called at once
        times["step alone"].append(spent)
        tree = way(tree, home, times, number)
    return tree


def with_orbax(tree, home: Path, times, number: int):
    start = time.perf_counter()
    response = ocp.save_async(home / "orbax", tree)
    times["orbax blocked"].append(time.perf_counter() - start)
    spent, tree = seconds(lambda: advance(tree))
    times["orbax next step"].append(spent)
    response.result()
    times["orbax total"].append(time.perf_counter() - start)
    times["orbax restore"].append(seconds(lambda: ocp.load(home / "orbax", like(tree)))[0])
    return tree


def with_ftrain(tree, home: Path, times, number: int):
    with CheckpointManager(home / "ftrain") as manager:
        start = time.perf_counter()
        manager.save(1, tree)
        times["ftrain blocked"].append(time.perf_counter() - start)
        spent, tree = seconds(lambda: advance(tree))
        times["ftrain next step"].append(spent)
        manager.wait()
        times["ftrain total"].append(time.perf_counter() - start)
        for verify in (True, False, False, True) if number % 2 else (False, True, True, False):
            spent, _ = seconds(
                lambda: manager.restore(like(tree), verify=verify)  # noqa: B023 - called at once
            )
            times[f"ftrain {'verified' if verify else 'unverified'} restore"].append(spent)
    return tree


def like(tree):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def measure(leaves: int, megabytes: int, rounds: int) -> dict[str, float]:
    tree = make_tree(leaves, megabytes)
    times = defaultdict(list)
    for number in range(rounds + 1):
        home = Path(tempfile.mkdtemp(prefix="checkpoints"))
        kept = times if number else defaultdict(list)  # the first round warms up
        tree = one_round(tree, home, kept, number)
        shutil.rmtree(home)
    return {name: statistics.median(spent) for name, spent in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    for name, (leaves, megabytes) in TREES.items():
        took = measure(leaves, megabytes, parser.parse_args().rounds)
        print(f"\n{name}")
        for label, mine, other in (
            ("blocked", "ftrain blocked", "orbax blocked"),
            ("total", "ftrain total", "orbax total"),
            ("verified restore", "ftrain verified restore", "orbax restore"),
            ("verified / unverified", "ftrain verified restore", "ftrain unverified restore"),
            ("next step", "ftrain next step", "orbax next step"),
        ):
            ratio = took[mine] / took[other]
            spent = f"{took[mine] * 1e3:8.1f} ms / {took[other] * 1e3:8.1f} ms"
            print(f"  {label:<22} {ratio:5.2f}   {spent}")
        print(f"  a step without a save        {took['step alone'] * 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
