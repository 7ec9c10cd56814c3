"""Functions that worker processes import."""

import os
import time

import numpy as np


def jitter(example, rng):
    """A transform that draws, and depends on nothing else."""
    return {"x": example["x"] + rng.normal(size=3).astype(np.float32), "y": example["y"]}


def tell_process(example, rng):
    return {"process": np.int64(os.getpid()), "x": example["x"]}


def fail(example, rng):
    if example["n"] == 17:
        raise ValueError(f"cannot work on {example['n']}")
    return example


def die(example, rng):
    os._exit(1)


def hang(example, rng):
    time.sleep(600)


class Peculiar(Exception):  # noqa: N818 - the name is the test's
    """Cannot be sent to another process: its `args` are not the arguments of its constructor."""

    def __init__(self, first, second):
        super().__init__("peculiar")


def raise_peculiar(example, rng):
    if example["n"] == 40:
        raise Peculiar(1, 2)
    return example
