"""Safetensors: one file of named arrays, or several with an index; single arrays are read.

The safetensors library is not used to read them. Measured with version 0.8: it is as fast, but
cannot read float8 into numpy, accepts a name that is listed twice, and maps the file, so that a
file that is cut off while it is read ends the process.
"""

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import ml_dtypes
import numpy as np

from ftrain.paths import PathError, expanded
from ftrain.storage import is_directory, is_file, list_names, raise_if_transient, read_whole

T = TypeVar("T")

INDEX_SUFFIX = ".safetensors.index.json"
SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_RANK = 64  # numpy's limit
_MAX_BYTES = 1 << 62
_METADATA = "__metadata__"
_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


class SafetensorsError(ValueError):
    """A file that is missing, cut off, or has a header that cannot be true."""


class StoredArray(NamedTuple):
    """The shape and dtype of an array in a file."""

    shape: tuple[int, ...]
    dtype: str  # as numpy or ml_dtypes name it


class ArrayFile(Protocol):
    """Named arrays in one or several files, each of which is read by itself."""

    @property
    def variables(self) -> Mapping[str, StoredArray]:
        """The shape and dtype of each array, sorted by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return the values of an array."""
        ...


class SafetensorsFile:
    """One safetensors file; opening it reads and checks the header only.

    Every array must take the bytes that its shape and dtype need, without gaps or overlaps, and all
    of them together the whole file. So no shape in a header can make a reader allocate more than
    the file has.
    """

    variables: Mapping[str, StoredArray]

    def __init__(self, path: str | Path):
        self._path = _checked_path(path)
        try:
            self._start, entries = _read_header(self._path)
        except OSError as error:
            raise_if_transient(error, self._path)
            raise SafetensorsError(f"{self._path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise SafetensorsError(f"{self._path}: {error}") from None
        self._entries = dict(sorted(entries.items()))
        self.variables = MappingProxyType(
            {
                name: StoredArray(entry.shape, entry.dtype.name)
                for name, entry in self._entries.items()
            }
        )

    def read(self, name: str) -> np.ndarray:
        """Return the values of an array."""
        entry = _find(self._path, self._entries, name)
        try:
            data = np.fromfile(self._path, np.uint8, entry.size, offset=self._start + entry.start)
        except OSError as error:
            raise_if_transient(error, self._path)
            raise SafetensorsError(f"{self._path}: cannot be read: {error.strerror}") from None
        if len(data) != entry.size:
            raise SafetensorsError(f"{self._path}: array {name!r} was cut short while it was read")
        if entry.dtype.kind == "b":
            return (data != 0).reshape(entry.shape)  # numpy cannot work with other bytes
        return data.view(entry.dtype).reshape(entry.shape)


class ShardedSafetensors:
    """Several safetensors files in a directory, and the index that lists which has which array.

    `index` is the path of the index, `model.safetensors.index.json`. All headers are read and
    checked.
    """

    variables: Mapping[str, StoredArray]

    def __init__(self, index: str | Path):
        self._index = _checked_path(index)
        try:
            places = _read_index(self._index)
        except OSError as error:
            raise_if_transient(error, self._index)
            raise SafetensorsError(f"{self._index}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise SafetensorsError(f"{self._index}: {error}") from None
        shards: dict[str, SafetensorsFile] = {}
        for name in sorted(set(places.values())):
            path = self._index.with_name(name)
            if not is_file(path):
                raise SafetensorsError(f"{self._index}: it lists {name}, which is missing")
            shards[name] = SafetensorsFile(path)
        for name, file in places.items():
            if name not in shards[file].variables:
                raise SafetensorsError(
                    f"{self._index}: it lists array {name!r} in {file}, which does not have it"
                )
        self._shards = {name: shards[places[name]] for name in sorted(places)}
        self.variables = MappingProxyType(
            {name: shard.variables[name] for name, shard in self._shards.items()}
        )

    def read(self, name: str) -> np.ndarray:
        """Return the values of an array."""
        return _find(self._index, self._shards, name).read(name)


def open_safetensors(path: str | Path) -> SafetensorsFile | ShardedSafetensors:
    """Open a safetensors file, an index, or a directory that `find_safetensors` finds."""
    found = find_safetensors(path)
    if found is None:
        raise SafetensorsError(
            f"{path}: expected a {SUFFIX} file, or a directory with model{INDEX_SUFFIX}"
        )
    return (ShardedSafetensors if found.name.endswith(INDEX_SUFFIX) else SafetensorsFile)(found)


def find_safetensors(path: str | Path) -> Path | None:
    """Return the file to open for a path: itself, or the index or model.safetensors in a directory.

    None if it is neither a safetensors file nor a directory of them. A directory with several
    indexes, or with other safetensors files only, is an error.
    """
    path = Path(path)
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return path if is_file(path) else None
    if not is_directory(path):
        return None
    names = list_names(path)
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(SUFFIX)]
    if len(indexes) > 1:
        raise SafetensorsError(f"{path} has several indexes, {', '.join(indexes)}: name one")
    if indexes:
        return path / indexes[0]
    single = f"model{SUFFIX}"
    if files and single not in files:
        raise SafetensorsError(
            f"{path} has safetensors files, but neither {single} nor model{INDEX_SUFFIX}, which "
            f"lists their arrays; name one file, such as {files[0]}"
        )
    return path / single if files else None


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    size: int


def _read_header(path: Path) -> tuple[int, dict[str, _Entry]]:
    """Return where the arrays start in a file, and the place of each."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
        raise ValueError("is not a regular file")
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"has {len(prefix)} bytes, expected a header: it is cut off or empty")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER_BYTES, status.st_size - 8):
            raise ValueError(
                f"its header would have {length} bytes, but the file has {status.st_size} and a "
                f"header at most {MAX_HEADER_BYTES}; it is cut off, or not a safetensors file"
            )
        text = file.read(length)
    if len(text) < length:
        raise ValueError("its header is cut off")
    table = _parse_table(text, "its header")
    table.pop(_METADATA, None)
    entries = {name: _parse_entry(name, entry) for name, entry in table.items()}
    _check_tiling(entries, status.st_size - 8 - length)
    return 8 + length, entries


def _parse_entry(name: str, entry: Any) -> _Entry:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"array {name!r} has no dtype, shape and data_offsets in the header")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(
            f"array {name!r} has dtype {entry['dtype']!r:.40}; supported are {', '.join(_DTYPES)}"
        )
    shape = entry["shape"]
    if not _are_sizes(shape) or len(shape) > _MAX_RANK:
        raise ValueError(f"array {name!r} has shape {shape!r:.80}, expected up to 64 sizes")
    if math.prod(max(side, 1) for side in shape) * dtype.itemsize > _MAX_BYTES:
        raise ValueError(f"array {name!r} has shape {shape!r:.80}, too large for any memory")
    offsets = entry["data_offsets"]
    needed = math.prod(shape) * dtype.itemsize
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        raise ValueError(
            f"array {name!r} is at {offsets!r:.80}, but {dtype.name}{shape!r:.80} "
            f"needs {needed} bytes"
        )
    return _Entry(tuple(shape), dtype, offsets[0], needed)


def _check_tiling(entries: Mapping[str, _Entry], size: int) -> None:
    """Raise unless the arrays fill the bytes after the header, one after the other."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != end:
            relation = "overlaps the one before it" if entry.start < end else "leaves a gap"
            raise ValueError(f"array {name!r} begins at data byte {entry.start} and {relation}")
        end = entry.start + entry.size
        if end > size:
            raise ValueError(
                f"array {name!r} ends at data byte {end}, but there are {size}: the file is cut off"
            )
    if end != size:
        raise ValueError(f"its arrays take {end} bytes, but it has {size} after the header")


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each array."""
    table = _parse_table(read_whole(path, MAX_HEADER_BYTES), "it")
    places = table.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError("it has no weight_map, a table from arrays to files")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(SUFFIX):
            raise ValueError(
                f"array {name!r} is in {file!r:.80}, expected the name of a {SUFFIX} file in the "
                "same directory"
            )
    return places


def _parse_table(text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for name, value in pairs:
            if name in table:
                raise ValueError(f"{name!r:.80} is listed twice")
            table[name] = value
        return table

    try:
        table = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} cannot be parsed: {error!s:.200}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{what} is not a table")
    return table


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_BYTES
        for value in values
    )


def _checked_path(path: str | Path) -> Path:
    try:
        return Path(expanded(path))
    except PathError as error:
        raise SafetensorsError(f"{error}") from None


def _find(path: Path, known: Mapping[str, T], name: str) -> T:
    if name not in known:
        raise SafetensorsError(f"{path}: there is no array {name!r} among its {len(known)}")
    return known[name]
