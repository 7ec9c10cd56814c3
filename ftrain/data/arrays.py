"""Arrays: examples in memory, or mapped from .npy and .npz files."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from ftrain.data.source import Batch
from ftrain.formats.numpy_files import as_value_error, check_compression, read_npy_header
from ftrain.paths import absolute

MAX_UNPACKED_BYTES = 1 << 32  # default limit of one compressed array: 4 GiB
_MAX_RATIO = 1032  # the largest compression ratio of deflate
_SMALL = 1 << 16  # bytes; smaller arrays may have any ratio

Files = str | Path | Mapping[str, str | Path]


class ArraySource:
    """Arrays in memory, or memory-mapped; each entry of the first axis is one example."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        if not isinstance(arrays, Mapping):
            raise TypeError(
                f"ArraySource takes a dict of arrays, {{'x': array}}, got {type(arrays).__name__}"
            )
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self._files: Files | None = None
        self._limit = MAX_UNPACKED_BYTES
        self._file_sizes: list[tuple[str | Path, int]] = []  # mapped files and their sizes
        if not self.arrays:
            raise ValueError("an ArraySource needs at least one array")
        scalars = [name for name, array in self.arrays.items() if array.ndim == 0]
        if scalars:
            raise ValueError(f"array {scalars[0]} is a scalar; it needs a first axis of examples")
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"arrays must have the same number of examples, got {lengths}")

    @classmethod
    def open(cls, files: Files, *, max_unpacked_bytes: int = MAX_UNPACKED_BYTES) -> Self:
        """Map an .npz file, an .npy file (named by its stem), or a dict of .npy files.

        Arrays are read on demand, except those of a compressed .npz file: they are read whole, and
        one of more than `max_unpacked_bytes` (4 GiB by default) is an error.
        """
        found = (
            {name: absolute(path) for name, path in files.items()}
            if isinstance(files, Mapping)
            else absolute(files)
        )
        source = cls(_map_files(found, max_unpacked_bytes))
        source._files = found
        source._file_sizes = _file_sizes(found)
        source._limit = max_unpacked_bytes
        return source

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __repr__(self) -> str:
        return f"ArraySource({', '.join(self.arrays) if self._files is None else self._files})"

    def read(self, indices: np.ndarray) -> Batch:
        """Return the examples at `indices`."""
        for path, size in self._file_sizes:
            # Reading a mapped page that the file no longer has would kill the process.
            if os.stat(path).st_size != size:
                raise ValueError(f"{path} was changed while in use; open it again")
        rows = {}
        for name, array in self.arrays.items():
            # take is twice as fast as array[indices], but copies all of a non-contiguous array.
            rows[name] = array.take(indices, axis=0) if array.flags.c_contiguous else array[indices]
        return rows

    def __getstate__(self) -> dict[str, Any]:
        # Another process maps the files itself, instead of receiving a copy of the arrays.
        return vars(self) if self._files is None else {"_files": self._files, "_limit": self._limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._files is not None:
            self.arrays = _map_files(self._files, self._limit)
            self._file_sizes = _file_sizes(self._files)


def _file_sizes(files: Files) -> list[tuple[str | Path, int]]:
    paths = list(files.values()) if isinstance(files, Mapping) else [files]
    return [(path, os.stat(path).st_size) for path in paths]


def _map_files(files: Files, limit: int) -> dict[str, np.ndarray]:
    if isinstance(files, Mapping):
        return {name: _map_npy(Path(path)) for name, path in files.items()}
    path = Path(files)
    if zipfile.is_zipfile(path):
        return _map_npz(path, limit)
    return {path.stem: _map_npy(path)}


def _map_npy(path: Path) -> np.ndarray:
    with as_value_error(f"{path} cannot be mapped as an .npy file"):
        with open(path, "rb") as file:
            read_npy_header(file)  # np.load would try other formats too
        return np.load(path, mmap_mode="r")


def _map_npz(path: Path, limit: int) -> dict[str, np.ndarray]:
    """Return the arrays of an archive, memory-mapped unless they are compressed."""
    with as_value_error(f"{path} cannot be read as an .npz file"):
        archive = zipfile.ZipFile(path)
    with archive:
        members = archive.infolist()
        return {
            info.filename.removesuffix(".npy"): _map_member(archive, info, path, limit)
            for info in members
        }


def _map_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, limit: int
) -> np.ndarray:
    with as_value_error(f"{path}: array {info.filename} cannot be read"):
        check_compression(info)
        with archive.open(info) as member:
            header = read_npy_header(member)
            begin = member.tell()
        if header.dtype.hasobject:
            raise ValueError("it holds Python objects")
        if header.bytes > info.file_size - begin:
            raise ValueError(
                f"its shape {header.shape} needs {header.bytes} bytes, but the file has fewer"
            )
        if info.compress_type == zipfile.ZIP_STORED:
            offset = _data_offset(path, info) + begin
            return np.memmap(
                path, header.dtype, "r", offset, header.shape, "F" if header.is_fortran else "C"
            )
        if header.bytes > limit:
            raise ValueError(f"it takes {header.bytes} bytes, more than max_unpacked_bytes={limit}")
        if (
            info.compress_type == zipfile.ZIP_DEFLATED
            and header.bytes > _SMALL + _MAX_RATIO * info.compress_size
        ):
            raise ValueError(
                f"it takes {header.bytes} bytes, too many for {info.compress_size} compressed bytes"
            )
        with archive.open(info) as member:
            return np.lib.format.read_array(member)


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Return where a member's bytes start: after its local header of variable length."""
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    name_length = int.from_bytes(header[26:28], "little")
    extra_length = int.from_bytes(header[28:30], "little")
    return info.header_offset + 30 + name_length + extra_length
