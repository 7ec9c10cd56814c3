"""NumPy archives as checkpoints: the arrays of an .npz file by name, each read by itself."""

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ftrain.formats.numpy_files import (
    NpyHeader,
    as_value_error,
    check_compression,
    read_npy_header,
)
from ftrain.formats.safetensors_files import StoredArray
from ftrain.paths import PathError, expanded
from ftrain.storage import raise_if_transient

SUFFIX = ".npz"
_READABLE = "biufcSU"  # kinds of dtypes: no Python objects, no dates, no records
_MAX_RATIO = 1032  # of deflate


class NpzError(ValueError):
    """An .npz file that is missing, damaged, or has arrays that cannot be read."""


class NpzFile:
    """The arrays of an .npz file; opening it reads their headers only.

    The checksum of an array is verified when it is read. NumPy cannot name bfloat16 and its like in
    a file: such arrays are listed as `void16`, and reading them is an error.
    """

    variables: Mapping[str, StoredArray]

    def __init__(self, path: str | Path):
        try:
            self._path = Path(expanded(path))
        except PathError as error:
            raise NpzError(f"{error}") from None
        self._members: dict[str, _Member] = {}
        with (
            _reporting(f"{self._path} is not an .npz file, or damaged", self._path),
            zipfile.ZipFile(self._path) as archive,
        ):
            size = os.path.getsize(self._path)
            for info in archive.infolist():
                self._add(archive, info, size)
        self._members = dict(sorted(self._members.items()))
        self.variables = MappingProxyType(
            {
                name: StoredArray(member.header.shape, member.header.dtype.name)
                for name, member in self._members.items()
            }
        )

    def read(self, name: str) -> np.ndarray:
        """Return the values of an array."""
        if name not in self._members:
            raise NpzError(
                f"{self._path}: there is no array {name!r} among its {len(self._members)}"
            )
        info, header, start = self._members[name]
        where = f"{self._path}: array {name!r}"
        if header.dtype.kind not in _READABLE or not header.dtype.itemsize:
            raise NpzError(
                f"{where} has dtype {header.dtype}, which has no meaning without the program that "
                "wrote it (Python objects, or a type that numpy does not name, such as bfloat16); "
                "exclude it, or write it as float32 or to a .safetensors file"
            )
        with (
            _reporting(f"{where} is damaged", self._path),
            zipfile.ZipFile(self._path) as archive,
            archive.open(info) as file,
        ):
            if len(file.read(start)) < start:
                raise ValueError("it is cut short")
            data = file.read(header.bytes)
            if len(data) != header.bytes or file.read(1):
                raise ValueError(f"its shape needs {header.bytes} bytes, but it has others")
        flat = np.frombuffer(data, header.dtype) if data else np.empty(0, header.dtype)
        shape = header.shape
        array = flat.reshape(shape[::-1]).T if header.is_fortran else flat.reshape(shape)
        return array.astype(header.dtype.newbyteorder("="), order="C")

    def _add(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, size: int) -> None:
        name = info.filename.removesuffix(".npy")
        if name == info.filename or not name:
            raise ValueError(f"{info.filename!r} is not an array of numpy, NAME.npy")
        if name in self._members:
            raise ValueError(f"array {name!r} is listed twice")
        check_compression(info)
        with archive.open(info) as file:
            header = read_npy_header(file)
            start = file.tell()
        # Checked before anything of that size is allocated. The bytes of objects are not counted.
        is_sized = header.dtype.hasobject or start + header.bytes == info.file_size
        if not is_sized or info.file_size > (_MAX_RATIO + 1) * size:
            raise ValueError(
                f"array {name!r} with shape {header.shape!s:.80} needs {header.bytes} bytes, "
                f"but the archive has {info.file_size - start} of it"
            )
        self._members[name] = _Member(info, header, start)


class _Member(NamedTuple):
    info: zipfile.ZipInfo
    header: NpyHeader
    start: int  # of the values in the member


@contextmanager
def _reporting(what: str, path: Path) -> Iterator[None]:
    """Raise NpzError for any error of a damaged archive."""
    try:
        with as_value_error(what):
            yield
    except NpzError:
        raise
    except OSError as error:
        raise_if_transient(error, path)
        raise NpzError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise NpzError(f"{error}") from None
