"""Readers: single leaves of a checkpoint, of ftrain or another program; statistics and export."""

import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

from ftrain.checkpoints.errors import CheckpointError, DamagedError, summarize_error
from ftrain.checkpoints.manifest import has_saved_values, read_manifest
from ftrain.checkpoints.matching import Selection, as_patterns, describe_leaf
from ftrain.checkpoints.orbax_layout import leaf_specs, max_leaf_bytes, open_leaves
from ftrain.checkpoints.paths import find_checkpoint
from ftrain.formats import (
    NpzError,
    NpzFile,
    SafetensorsError,
    TfCheckpoint,
    TfCheckpointError,
    find_safetensors,
    is_tf_checkpoint,
    open_safetensors,
)
from ftrain.storage import raise_if_transient, replacing, retry
from ftrain.suggestions import suggest

ExportFormat = Literal["safetensors", "npz"]
_CHUNK = 1 << 20  # elements converted to double precision at a time


class Variable(NamedTuple):
    """The shape and dtype of a leaf."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Its size; 0 for text and for dtypes that only TensorFlow has."""
        try:
            return math.prod(self.shape) * np.dtype(self.dtype).itemsize
        except TypeError:
            return 0


class Statistics(NamedTuple):
    """Statistics of the finite elements of an array."""

    mean: float
    std: float
    min: float
    max: float
    zeros: float  # the share of elements that are zero
    not_finite: int  # number of non-finite elements


class Difference(NamedTuple):
    """How far two arrays are apart."""

    absolute: float  # the largest
    relative: float  # the largest, relative to the larger of the two values
    elements: int  # number of elements that differ; NaN equals NaN


class CheckpointReader(Protocol):
    """The variables of one checkpoint by name, each of which is read by itself."""

    path: Path

    @property
    def variables(self) -> Mapping[str, Variable]:
        """The shape and dtype of each variable."""
        ...

    def read(self, name: str, *, verify: bool = True) -> np.ndarray:
        """Return the values of a variable, verified unless `verify` is False."""
        ...


def open_reader(path: str | Path) -> CheckpointReader:
    """Open a checkpoint; the latest one, if `path` is a run or a directory of checkpoints.

    `RUN/best` and `RUN/latest` name one by its role. A file may be of TensorFlow (its prefix),
    .safetensors (or a directory with an index of several) or .npz.
    """

    def open_found() -> CheckpointReader:
        found = find_checkpoint(path)
        if is_tf_checkpoint(found):
            return _TensorFlowReader(found)
        is_file_format = found.suffix == ".npz" or find_safetensors(found) is not None
        return _ArrayFileReader(found) if is_file_format else _OrbaxReader(found)

    return retry(open_found)


def list_variables(path: str | Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of all leaves of a checkpoint."""
    return [(name, variable.shape) for name, variable in open_reader(path).variables.items()]


def load_variable(path: str | Path, name: str) -> np.ndarray:
    """Return one leaf of a checkpoint."""
    return open_reader(path).read(name)


def export(
    reader: CheckpointReader,
    path: Path,
    to: ExportFormat,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    done: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Write the leaves whose whole names match to one file, atomically, and return their names.

    `done` is called with each leaf's name. numpy's format has no bfloat16 and similar types: there
    they become float32, which holds all of their values.
    """
    chosen = Selection(include=as_patterns(include), exclude=as_patterns(exclude))
    names = [name for name in reader.variables if chosen.takes(name)]
    if not names:
        raise CheckpointError(
            f"{reader.path}: the patterns select none of its {len(reader.variables)} leaves"
        )
    if not path.parent.is_dir():
        raise CheckpointError(f"{path} cannot be written: there is no directory {path.parent}")
    text = [name for name in names if reader.variables[name].dtype == "string"]
    if text:
        raise CheckpointError(
            f"{reader.path}: leaf {text[0]} is text, which {to} does not hold; exclude it"
        )
    write = {"safetensors": _write_safetensors, "npz": _write_npz}[to]
    with replacing(path, path.with_name(f".{path.name}.part")) as temporary:
        write(reader, names, temporary, done)
        temporary.chmod(0o666 & ~_umask())  # safetensors keeps other users from reading it
    return names


def describe_values(array: np.ndarray) -> Statistics | None:
    """Return statistics of the elements, of complex ones those of their absolute values.

    Returns None for text and for arrays without elements.
    """
    if array.dtype.kind in "OSU" or not array.size:
        return None
    count = 0
    total = 0.0
    squares = 0.0  # sum of squared distances from the mean
    zeros = 0
    not_finite = 0
    low = math.inf
    high = -math.inf
    for (part,) in _chunks(array):
        chunk = np.abs(part).astype(np.float64) if part.dtype.kind == "c" else _as_doubles(part)
        finite = chunk[np.isfinite(chunk)]
        not_finite += chunk.size - finite.size
        zeros += int(np.count_nonzero(chunk == 0))
        if finite.size:
            low = min(low, float(finite.min()))
            high = max(high, float(finite.max()))
            # Combine means and squares chunk by chunk, without cancellation.
            mean = float(finite.mean())
            seen = count + finite.size
            squares += float(((finite - mean) ** 2).sum())
            if count:
                squares += (mean - total / count) ** 2 * count * finite.size / seen
            count = seen
            total += float(finite.sum())
    share = zeros / array.size
    if not count:
        return Statistics(math.nan, math.nan, math.nan, math.nan, share, not_finite)
    return Statistics(total / count, math.sqrt(squares / count), low, high, share, not_finite)


def compare_values(left: np.ndarray, right: np.ndarray) -> Difference:
    """Return the difference of two arrays of the same shape and dtype."""
    if left.dtype.kind in "OSU":
        differing = int(np.count_nonzero(left != right))
        distance = math.inf if differing else 0.0
        return Difference(distance, distance, differing)
    absolute = 0.0
    relative = 0.0
    differing = 0
    for one, other in _chunks(left, right):
        differs = one != other  # exact, also for integers that a double cannot represent
        if left.dtype.kind not in "biu":
            differs &= ~(np.isnan(one) & np.isnan(other))
        if differs.any():
            gap, larger = _gaps(_as_doubles(one[differs]), _as_doubles(other[differs]))
            differing += int(differs.sum())
            absolute = max(absolute, float(gap.max()))
            relative = max(relative, float((gap / larger).max()))
    return Difference(absolute, relative, differing)


class _OrbaxReader:
    """Reads a checkpoint of ftrain or plain Orbax."""

    def __init__(self, path: Path):
        self.path = path
        self._manifest = read_manifest(path)
        self._specs = leaf_specs(path)
        leaves = (
            self._manifest.leaves if self._manifest else open_leaves(path, self._specs, self._specs)
        )
        self.variables = {
            name: Variable(tuple(leaf.shape), np.dtype(leaf.dtype).name)
            for name, leaf in sorted(leaves.items())
        }

    def read(self, name: str, *, verify: bool = True) -> np.ndarray:
        """Return the values of a leaf."""
        return retry(lambda: self._read(name, verify))

    def _read(self, name: str, verify: bool) -> np.ndarray:
        expected = _find_variable(self, name)
        if 0 in expected.shape:
            return np.empty(expected.shape, expected.dtype)
        if name not in self._specs:
            raise DamagedError(self.path, [f"leaf {name} is missing"])
        found = open_leaves(self.path, self._specs, [name])[name]
        if describe_leaf(found) != describe_leaf(expected):
            raise DamagedError(
                self.path,
                [f"leaf {name} is {describe_leaf(found)}, expected {describe_leaf(expected)}"],
            )
        try:
            value = found.read()
        except ValueError as error:
            raise_if_transient(error, self.path)
            raise DamagedError(
                self.path, [f"leaf {name} cannot be read: {summarize_error(error)}"]
            ) from error
        if verify and self._manifest and not has_saved_values(value, self._manifest.leaves[name]):
            raise DamagedError(self.path, [f"leaf {name} has other values than were saved"])
        return value

    def __str__(self) -> str:
        return str(self.path)


class _TensorFlowReader:
    """Reads a TensorFlow checkpoint; in an object-based one, names are paths of objects."""

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
        """Return the values of a variable, by its object's name or its name on disk."""
        if name not in self._checkpoint.variables:
            _find_variable(self, name)
        try:
            return retry(lambda: self._checkpoint.read(self._keys.get(name, name), verify=verify))
        except TfCheckpointError as error:
            raise CheckpointError(str(error)) from error

    def __str__(self) -> str:
        return str(self.path)


class _ArrayFileReader:
    """Reads the arrays of .safetensors and .npz files."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = NpzFile(path) if path.suffix == ".npz" else open_safetensors(path)
        except (SafetensorsError, NpzError) as error:
            raise CheckpointError(str(error)) from error
        self.variables = {name: Variable(*each) for name, each in self._file.variables.items()}

    def read(self, name: str, *, verify: bool = True) -> np.ndarray:
        """Return the values of an array; .npz has checksums, which are always verified."""
        size = _find_variable(self, name).bytes
        limit, origin = max_leaf_bytes()
        if size > limit:
            raise CheckpointError(
                f"{self.path}: leaf {name} would have {size} bytes, "
                f"expected at most {limit} ({origin})"
            )
        try:
            return retry(lambda: self._file.read(name))
        except (SafetensorsError, NpzError) as error:
            raise CheckpointError(str(error)) from error

    def __str__(self) -> str:
        return str(self.path)


def _find_variable(reader: CheckpointReader, name: str) -> Variable:
    if name not in reader.variables:
        hint = suggest(name, reader.variables, count=3)
        hint = hint or f"; it has {len(reader.variables)} others"
        raise CheckpointError(f"{reader.path} has no leaf {name!r}{hint}")
    return reader.variables[name]


def _write_safetensors(
    reader: CheckpointReader, names: Sequence[str], path: Path, done: Callable[[str], None]
) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays: dict[str, np.ndarray] = {}
    for name in names:
        arrays[name] = np.asarray(reader.read(name), order="C")
        done(name)
    try:
        save_file(arrays, path)
    except SafetensorError as error:
        raise CheckpointError(f"{reader.path}: safetensors refuses it: {error}") from error


def _write_npz(
    reader: CheckpointReader, names: Sequence[str], path: Path, done: Callable[[str], None]
) -> None:
    """Write one leaf at a time, so that only one is in memory."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name in names:
            value = reader.read(name)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(
                    file, value.astype(np.float32) if value.dtype.kind == "V" else value
                )
            done(name)


def _gaps(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return distances, infinite where one value is NaN, and the sizes of the larger values."""
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(one - other)
        larger = np.maximum(np.abs(one), np.abs(other))
    gap = np.where(np.isnan(gap), math.inf, gap)
    return gap, np.where(np.isfinite(larger) & (larger > 0), larger, 1.0)


def _chunks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Iterate over arrays of the same size side by side, some elements at a time."""
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _CHUNK):
        yield tuple(each[start : start + _CHUNK] for each in flat)


def _as_doubles(chunk: np.ndarray) -> np.ndarray:
    return chunk.astype(np.complex128 if chunk.dtype.kind == "c" else np.float64)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
