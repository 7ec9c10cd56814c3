"""NumPy files, with checks that numpy lacks: .npy headers, and damage of .npz archives."""

import errno
import io
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple

import numpy as np

MAX_HEADER_BYTES = 10_000  # numpy's own limit
_MAX_RANK = 64  # numpy's limit
_MAX_BYTES = 1 << 62
_ARCHIVE_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError),
    *(ValueError, KeyError, IndexError, OverflowError, TypeError),
)


class NpyHeader(NamedTuple):
    """The header of an .npy file, with a valid shape whose bytes can be counted."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """The bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(file: IO[bytes]) -> NpyHeader:
    """Read the header of an .npy file, up to 10,000 bytes; ValueError if it is damaged."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its format has version {version}, expected (1, 0) to (3, 0)")
    width = 2 if version == (1, 0) else 4
    prefix = file.read(width)
    size = int.from_bytes(prefix, "little")
    if len(prefix) < width or size > MAX_HEADER_BYTES:  # numpy reads before it checks
        raise ValueError(f"its header has {size} bytes, expected at most {MAX_HEADER_BYTES}")
    text = file.read(size)
    if len(text) < size:
        raise ValueError("its header is cut short")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's parser warns about odd text
            shape, is_fortran, dtype = _parse(version, prefix + text)
    except Exception as error:  # noqa: BLE001 - Python's parser raises many types
        raise ValueError(f"its header cannot be parsed: {_first_line(error)}") from None
    if len(shape) > _MAX_RANK or any(isinstance(side, bool) or side < 0 for side in shape):
        raise ValueError(
            f"its shape is {_short(shape)}, expected up to {_MAX_RANK} sizes of at least 0"
        )
    if math.prod(max(side, 1) for side in shape) * max(dtype.itemsize, 1) > _MAX_BYTES:
        raise ValueError(f"its shape is {_short(shape)}, too large for any memory")
    return NpyHeader(shape, is_fortran, dtype)


def check_compression(member: zipfile.ZipInfo) -> None:
    """Raise ValueError unless a member is stored or deflated: others can claim any memory."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(
            f"its compression is {member.compress_type}, expected 0 (stored) or 8 (deflated)"
        )


@contextmanager
def as_value_error(what: str) -> Iterator[None]:
    """Turn any error of zipfile for a damaged archive into a ValueError that starts with `what`."""
    try:
        yield
    except _ARCHIVE_ERRORS as error:
        raise ValueError(f"{what}: {_first_line(error)}") from None
    except OSError as error:
        # bz2 raises OSError without errno for damaged data; a negative offset gives EINVAL.
        if error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(f"{what}: {_first_line(error)}") from None


def _parse(version: tuple[int, int], data: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    # Version (3, 0) is (2, 0) in UTF-8, for names of fields.
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    return read(io.BytesIO(data))


def _first_line(error: Exception) -> str:
    return f"{error}".strip().partition("\n")[0][:200] or type(error).__name__


def _short(shape: tuple[int, ...]) -> str:
    sides = [
        f"{side}" if abs(side) < 1 << 64 else f"<{side.bit_length()} bits>" for side in shape[:8]
    ]
    return f"({', '.join(sides)}{', ...' if len(shape) > 8 else ',' if len(shape) == 1 else ''})"
