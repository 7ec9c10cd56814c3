"""Checkpoints in memory, and small arrays, for tests of warm starts."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ftrain.tree import named_leaves


class Stored(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


class Memory:
    """A checkpoint in memory that records which variables are read."""

    def __init__(self, **arrays):
        self.arrays = {name.replace("__", "/"): np.asarray(array) for name, array in arrays.items()}
        self.reads = []

    @property
    def variables(self):
        return {name: Stored(array.shape, str(array.dtype)) for name, array in self.arrays.items()}

    def read(self, name):
        self.reads.append(name)
        return self.arrays[name]

    def __str__(self):
        return "runs/old/7"


def floats(*values):
    return np.array(values, np.float32)


def values(tree):
    return {name: np.asarray(leaf).tolist() for name, leaf in named_leaves(tree).items()}


def empty_params():
    return {"enc": {"w": jnp.zeros(2), "b": jnp.zeros(1)}, "head": jnp.zeros(1)}


def old_checkpoint():
    return Memory(
        old__w=floats(1, 2), old__b=floats(3), enc__w=floats(4, 5), enc__b=floats(6), head=floats(7)
    )
