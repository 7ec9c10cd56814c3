"""The checkpoint manager: numbered checkpoints of one pytree in a directory, on Orbax."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ftrain.checkpoints.matching import describe_differences
from ftrain.packed import pack_like, unpack
from ftrain.tree import Tree, named_leaves

_COMMITTED = "commit_success.txt"  # Orbax writes it last
_DELETING = ".deleting"
_LEFTOVER = re.compile(r"\d+(\.deleting|\.orbax-checkpoint-tmp.*)")


class CheckpointError(ValueError):
    """A checkpoint that is not there, or does not fit."""


class _Response(Protocol):
    def result(self, timeout: float | None = None) -> Any: ...


class CheckpointManager:
    """Saves a pytree under step numbers and keeps the newest `keep` of them.

        with CheckpointManager("runs/mine/checkpoints", keep=3) as manager:
            manager.save(100, tree)
            tree = manager.restore(like=tree)

    Inside of `with`, a save returns once the values are copied, and writing goes on behind it; outside, where nothing
    waits for it at the end of the program, it returns when all is written. A checkpoint appears under its number all
    at once, when it is complete, and an older one is deleted only after that. Opening a directory does not change it.
    """

    def __init__(self, directory: str | Path, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self.directory = Path(directory).absolute()  # Orbax takes no relative paths
        self.keep = keep
        self._unfinished: tuple[int, _Response] | None = None
        self._swept = False
        self._entered = False

    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first."""
        if not self.directory.is_dir():
            return []
        numbered = [path for path in self.directory.iterdir() if path.name.isdecimal()]
        return sorted(int(path.name) for path in numbered if (path / _COMMITTED).exists())

    def latest(self) -> int | None:
        """The newest step that can be restored."""
        return max(self.steps(), default=None)

    def save(self, step: int, tree: Tree) -> None:
        """Start to save `tree` under `step`, after the save before this one has finished."""
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"a step must be a whole number >= 0, got {step!r}")
        arrays = _as_arrays(unpack(tree))
        self.wait()
        self._sweep()
        if step in self.steps():
            raise CheckpointError(f"{self._path(step)} exists already; checkpoints are never written over")
        if self._path(step).exists():  # without its commit file: a broken copy, say
            self._path(step).rename(_unused(self._path(step).with_name(f"{step}.incomplete")))
        self._unfinished = step, ocp.save_async(str(self._path(step)), arrays)
        if not self._entered:
            self.wait()

    def restore(self, like: Tree, step: int | None = None) -> Tree:
        """The tree saved under `step`, or the newest one; `like` gives its structure, shapes, dtypes and shardings."""
        self.wait()
        path = self.check(like, step)
        with self._reading(path):
            return pack_like(ocp.load(str(path), unpack(jax.tree.map(_abstract, like))), like)

    def check(self, like: Tree, step: int | None = None) -> Path:
        """The path of a checkpoint, if it is there and its leaves are those of `like`; only shapes are looked at."""
        there = self.steps()
        step = max(there, default=None) if step is None else step
        if step is None:
            raise CheckpointError(f"{self.directory}: there is no checkpoint yet")
        if step not in there:
            raise CheckpointError(f"{self.directory}: there is no checkpoint of step {step}; there are {there}")
        path = self._path(step)
        with self._reading(path):
            found = named_leaves(ocp.metadata(str(path)).metadata)
            if not found:
                raise FileNotFoundError("it has no leaves")
        differences = describe_differences(
            found, named_leaves(jax.tree.map(_as_stored, unpack(jax.tree.map(_abstract, like))))
        )
        if differences:
            raise CheckpointError(f"{path} does not fit: " + "; ".join(differences))
        return path

    def wait(self) -> None:
        """Wait for the save that is under way; what went wrong in it is raised here."""
        if self._unfinished is None:
            return
        step, response = self._unfinished
        self._unfinished = None
        response.result()
        for old in [kept for kept in self.steps() if kept < step][: -self.keep + 1 or None]:
            self.delete(old)

    def delete(self, step: int) -> None:
        """Delete a checkpoint; at no moment does half of one stand under its number."""
        if step not in self.steps():
            raise CheckpointError(f"{self.directory}: there is no checkpoint of step {step}; there are {self.steps()}")
        aside = self._path(step).with_name(f"{step}{_DELETING}")
        self._path(step).rename(aside)
        shutil.rmtree(aside)

    def close(self) -> None:
        self._entered = False
        self.wait()

    def __enter__(self) -> "CheckpointManager":
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = f"{error}".strip().partition("\n")[0][:200]
            older = [step for step in self.steps() if step < int(path.name)]
            way_out = f"delete it to go on from step {older[-1]}" if older else "there is no older one"
            raise CheckpointError(f"{path} cannot be read; it may be damaged: {reason}\n{way_out}") from error

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _sweep(self) -> None:
        """Remove what a killed process left half written or half deleted, once, before the first save."""
        if self._swept:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)
        self._swept = True


def _as_arrays(tree: Tree) -> Tree:
    """The tree with plain numbers as arrays; what is neither cannot be saved, and its leaf is named."""
    leaves = named_leaves(tree)
    if not leaves:
        raise CheckpointError("there is nothing to save: the tree has no leaves")
    for name, leaf in leaves.items():
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise CheckpointError(f"leaf {name} is a {type(leaf).__name__}; only arrays and numbers can be saved")
        if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "OSU":
            raise CheckpointError(f"leaf {name} is an array of {leaf.dtype}; only arrays of numbers can be saved")
    return jax.tree.map(_as_array, tree)


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
        return leaf
    return np.asarray(leaf, dtype=jax.numpy.result_type(leaf))


def _abstract(leaf: Any) -> Any:
    """What Orbax is told to load a leaf as: numpy arrays stay numpy, which keeps their 64 bits."""
    array = _as_array(leaf)
    if isinstance(array, np.ndarray):
        return np.empty(array.shape, array.dtype)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _as_stored(leaf: Any) -> Any:
    """The shape and dtype that a leaf has on disk: keys are stored as the numbers they are made of."""
    array = _as_array(leaf)
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.eval_shape(jax.random.key_data, array) if is_key else array


def _unused(path: Path) -> Path:
    number = 1
    while path.exists():
        number += 1
        path = path.with_suffix(f".incomplete{number}")
    return path
