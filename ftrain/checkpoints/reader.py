"""Readers: single leaves of a checkpoint, without the rest of it; ftrain's, plain Orbax's or TensorFlow's."""

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ftrain.checkpoints.errors import CheckpointError, DamagedError, in_one_line
from ftrain.checkpoints.finding import locate
from ftrain.checkpoints.layout import leaf_specs, open_leaves
from ftrain.checkpoints.manifest import read_manifest
from ftrain.checkpoints.matching import describe
from ftrain.checkpoints.verifying import is_as_saved
from ftrain.formats import TfCheckpoint, TfCheckpointError, is_tf_checkpoint
from ftrain.storage import raise_if_transient, retry


class Variable(NamedTuple):
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Its size; 0 of text, and of what only TensorFlow knows."""
        try:
            return math.prod(self.shape) * np.dtype(self.dtype).itemsize
        except TypeError:
            return 0


class CheckpointReader(Protocol):
    """The variables of one checkpoint by name, each of which is read by itself."""

    path: Path

    @property
    def variables(self) -> Mapping[str, Variable]: ...
    def read(self, name: str, *, verify: bool = True) -> np.ndarray: ...


def open_reader(path: str | Path) -> CheckpointReader:
    """A reader of a checkpoint; of the latest one, if `path` is a directory of them or of a run."""

    def open_located() -> CheckpointReader:
        found = locate(path)
        return _TensorFlow(found) if is_tf_checkpoint(found) else _Orbax(found)

    return retry(open_located)


def list_variables(path: str | Path) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of all leaves of a checkpoint."""
    return [(name, variable.shape) for name, variable in open_reader(path).variables.items()]


def load_variable(path: str | Path, name: str) -> np.ndarray:
    """One leaf of a checkpoint."""
    return open_reader(path).read(name)


class _Orbax:
    def __init__(self, path: Path):
        self.path, self._manifest, self._specs = path, read_manifest(path), leaf_specs(path)
        leaves = (
            self._manifest.leaves if self._manifest else open_leaves(path, self._specs, self._specs)
        )
        self.variables = {
            name: Variable(tuple(leaf.shape), np.dtype(leaf.dtype).name)
            for name, leaf in sorted(leaves.items())
        }

    def read(self, name: str, *, verify: bool = True) -> np.ndarray:
        return retry(lambda: self._read(name, verify))

    def _read(self, name: str, verify: bool) -> np.ndarray:
        wanted = _known(self, name)
        if 0 in wanted.shape:
            return np.empty(wanted.shape, wanted.dtype)
        if name not in self._specs:
            raise DamagedError(self.path, [f"leaf {name} is missing"])
        found = open_leaves(self.path, self._specs, [name])[name]
        if describe(found) != describe(wanted):
            raise DamagedError(
                self.path, [f"leaf {name} is {describe(found)}, expected {describe(wanted)}"]
            )
        try:
            value = found.read()
        except ValueError as error:
            raise_if_transient(error, self.path)
            raise DamagedError(
                self.path, [f"leaf {name} cannot be read: {in_one_line(error)}"]
            ) from error
        if verify and self._manifest and not is_as_saved(value, self._manifest.leaves[name]):
            raise DamagedError(self.path, [f"leaf {name} has other values than were saved"])
        return value

    def __str__(self) -> str:
        return str(self.path)


class _TensorFlow:
    """TensorFlow's; of an object-based one the variables are named by the objects, as `model/dense/kernel`."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._checkpoint = TfCheckpoint(path)
            self._keys = self._checkpoint.objects() or {
                name: name for name in self._checkpoint.variables
            }
        except TfCheckpointError as error:
            raise CheckpointError(str(error)) from error
        stored = self._checkpoint.variables
        self.variables = {
            name: Variable(*stored[key])
            for name, key in sorted(self._keys.items())
            if key in stored
        }

    def read(self, name: str, *, verify: bool = True) -> np.ndarray:
        if (
            name not in self._checkpoint.variables
        ):  # where it may stand under the name that is on disk
            _known(self, name)
        try:
            return retry(lambda: self._checkpoint.read(self._keys.get(name, name), verify=verify))
        except TfCheckpointError as error:
            raise CheckpointError(str(error)) from error

    def __str__(self) -> str:
        return str(self.path)


def _known(reader: CheckpointReader, name: str) -> Variable:
    if name not in reader.variables:
        near = difflib.get_close_matches(name, reader.variables, n=3)
        hint = (
            f"; near it are {', '.join(near)}"
            if near
            else f"; it has {len(reader.variables)} others"
        )
        raise CheckpointError(f"{reader.path} has no leaf {name!r}{hint}")
    return reader.variables[name]
