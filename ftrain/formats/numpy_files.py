"""NumPy files: .npy headers and .npz archives, with checks that numpy lacks.

As a table, entry i of every array of an archive along its first axis forms row i.
"""

import errno
import io
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from ftrain.formats.records.encoding import MAX_RECORD_BYTES
from ftrain.formats.tables import (
    Row,
    ShowProgress,
    TableError,
    as_floats,
    hide_progress,
    printable,
)

MAX_HEADER_BYTES = 10_000  # numpy's own limit
_MAX_RANK = 64  # numpy's limit
_MAX_BYTES = 1 << 62
_ARCHIVE_ERRORS = (  # what zipfile raises for damaged archives
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    IndexError,
    KeyError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
_CHUNK = 1 << 20  # bytes of all arrays that are read at once, approximately
_MAX_EMPTY = 1 << 20  # rows of an archive whose rows take no bytes
_MAX_PADDING = 64  # ratio of an array of padded bytes to the bytes of its values


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
    if len(prefix) < width or size > MAX_HEADER_BYTES:  # numpy reads it before it checks the size
        raise ValueError(f"its header has {size} bytes, expected at most {MAX_HEADER_BYTES}")
    text = file.read(size)
    if len(text) < size:
        raise ValueError("its header is cut short")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's parser warns about unusual text
            shape, is_fortran, dtype = _parse_header(version, prefix + text)
    except Exception as error:  # noqa: BLE001 - Python's parser raises many types
        raise ValueError(f"its header cannot be parsed: {_first_line(error)}") from None
    if len(shape) > _MAX_RANK or any(isinstance(side, bool) or side < 0 for side in shape):
        raise ValueError(
            f"its shape is {_shorten(shape)}, expected up to {_MAX_RANK} sizes of at least 0"
        )
    if math.prod(max(side, 1) for side in shape) * max(dtype.itemsize, 1) > _MAX_BYTES:
        raise ValueError(f"its shape is {_shorten(shape)}, too large for any memory")
    return NpyHeader(shape, is_fortran, dtype)


def check_compression(member: zipfile.ZipInfo) -> None:
    """Raise ValueError unless a member is stored or deflated: others may expand without limit."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(
            f"its compression is {member.compress_type}, expected 0 (stored) or 8 (deflated)"
        )


@contextmanager
def as_value_error(what: str) -> Iterator[None]:
    """Raise a ValueError that starts with `what` for any error of zipfile in a damaged archive."""
    try:
        yield
    except _ARCHIVE_ERRORS as error:
        raise ValueError(f"{what}: {_first_line(error)}") from None
    except OSError as error:
        # bz2 raises OSError without errno for damaged data; a negative offset gives EINVAL.
        if error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(f"{what}: {_first_line(error)}") from None


def _parse_header(version: tuple[int, int], data: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    # Version (3, 0) is (2, 0) in UTF-8, for names of fields.
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    return read(io.BytesIO(data))


def _first_line(error: Exception) -> str:
    return f"{error}".strip().partition("\n")[0][:200] or type(error).__name__


def _shorten(shape: tuple[int, ...]) -> str:
    sides = [
        f"{side}" if abs(side) < 1 << 64 else f"<{side.bit_length()} bits>" for side in shape[:8]
    ]
    return f"({', '.join(sides)}{', ...' if len(shape) > 8 else ',' if len(shape) == 1 else ''})"


def read_npz(
    paths: Sequence[Path],
    max_record_bytes: int = MAX_RECORD_BYTES,
    show: ShowProgress = hide_progress,
) -> Iterator[Row]:
    """Yield the entries of archives whose arrays have the same names and kinds.

    Entries are read in chunks, up to `max_record_bytes` for one entry of one array. Arrays in
    Fortran order are read whole, up to `max_record_bytes` each.
    """
    first: dict[str, str] | None = None
    with show("converting", paths) as progress:
        for path in paths:
            with _open_archive(path) as archive, ExitStack() as members:
                columns = [
                    _ArrayReader(path, archive, info, members, max_record_bytes)
                    for info in archive.infolist()
                ]
                kinds = {column.name: column.kind for column in columns}
                if len(kinds) < len(columns) or "" in kinds:
                    raise TableError(
                        f"{path}: two of its arrays have the same name, or one has none"
                    )
                first = kinds if first is None else first
                if kinds != first:
                    raise TableError(
                        f"{path}: its arrays are {kinds}, expected {first} as in {paths[0]}"
                    )
                yield from progress.follow(path, _read_rows(path, columns), _row_bytes)


def write_npz(path: Path, rows: Iterator[Row]) -> int:
    """Write rows of decoded Examples, each feature of one shape; return their number."""
    columns: dict[str, list[np.ndarray]] = {}
    count = 0
    for where, features in rows:
        if not count:
            columns = {name: [] for name in features}
        for name in columns.keys() | features.keys():
            values = features.get(name)
            columns[name].append(_check_alike(values, columns.get(name), name, where))
        count += 1
    with zipfile.ZipFile(path, "x", allowZip64=True) as archive:
        for name in sorted(columns):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, _stack(name, columns.pop(name)))
    return count


class _ArrayReader:
    """One array of an archive, read from start to end."""

    def __init__(
        self,
        path: Path,
        archive: zipfile.ZipFile,
        member: zipfile.ZipInfo,
        members: ExitStack,
        limit: int,
    ):
        self.name = member.filename.removesuffix(".npy")
        self._where = f"{path}: array {printable(self.name)}"
        with _as_table_error(f"{self._where} cannot be read"):
            check_compression(member)
            self._file: IO[bytes] = members.enter_context(archive.open(member))
            header = read_npy_header(self._file)
        shape, by_columns, self.dtype = header
        kinds = {"f": "float", "i": "int64", "u": "int64", "b": "int64", "S": "bytes", "U": "bytes"}
        if self.dtype.kind not in kinds:
            raise TableError(
                f"{self._where} is of dtype {self.dtype}, "
                "expected numbers, bytes ('S') or text ('U')"
            )
        if not shape:
            raise TableError(
                f"{self._where} is a single value, expected an array with one entry per record"
            )
        self.kind = kinds[self.dtype.kind]
        self.length = shape[0]
        self._width = math.prod(shape[1:])
        self._check_size(header, member, limit)
        self._whole = self._read_by_columns(shape) if by_columns and len(shape) > 1 else None

    @property
    def entry_bytes(self) -> int:
        """The bytes of one entry."""
        return self._width * self.dtype.itemsize

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the next `count` entries as rows; `start` must be where the last call ended."""
        if self._whole is None:
            table = self._read(count * self._width).reshape(count, self._width)
        else:
            table = self._whole[start : start + count]
        if self.kind == "float":
            return as_floats(table, self.name, self._where)
        try:
            return _as_int64_or_bytes(table)
        except ValueError as error:
            raise TableError(f"{self._where} has text that is not Unicode: {error}") from None

    def _check_size(self, header: NpyHeader, member: zipfile.ZipInfo, limit: int) -> None:
        """Raise TableError for a shape beyond the archive or the limit, before it takes memory."""
        if header.bytes > member.file_size:
            raise TableError(
                f"{self._where} is cut short: its shape {header.shape} needs {header.bytes} bytes, "
                "but the archive has fewer"
            )
        size = header.bytes if header.is_fortran and len(header.shape) > 1 else self.entry_bytes
        if size > limit:
            what = "takes" if header.is_fortran else "has entries of"
            raise TableError(
                f"{self._where} {what} {size} bytes, more than {limit}; "
                "raise the limit with --max-record-bytes"
            )

    def _read(self, count: int) -> np.ndarray:
        expected = count * self.dtype.itemsize
        with _as_table_error(f"{self._where} is damaged"):
            data = self._file.read(expected)
        if len(data) != expected:
            raise TableError(f"{self._where} is cut short")
        return np.frombuffer(data, self.dtype) if expected else np.zeros(count, self.dtype)

    def _read_by_columns(self, shape: tuple[int, ...]) -> np.ndarray:
        """Read all of an array in Fortran order."""
        return self._read(math.prod(shape)).reshape(shape[::-1]).T.reshape(shape[0], -1)


def _open_archive(path: Path) -> zipfile.ZipFile:
    with _as_table_error(f"{path} is not an .npz file, or damaged"):
        return zipfile.ZipFile(path)


@contextmanager
def _as_table_error(what: str) -> Iterator[None]:
    try:
        with as_value_error(what):
            yield
    except ValueError as error:
        raise TableError(f"{error}") from None


def _read_rows(path: Path, columns: Sequence[_ArrayReader]) -> Iterator[Row]:
    if not columns:
        raise TableError(f"{path} has no arrays")
    lengths = {column.name: column.length for column in columns}
    if len(set(lengths.values())) > 1:
        raise TableError(
            f"{path}: its arrays have different lengths, {lengths}; expected one entry per record"
        )
    length = columns[0].length
    size = sum(column.entry_bytes for column in columns)
    if not size and length > _MAX_EMPTY:
        raise TableError(
            f"{path} has {length} entries of 0 elements each, expected at most {_MAX_EMPTY} of "
            "them; remove the empty arrays"
        )
    chunk = max(_CHUNK // (size + len(columns)), 1)
    for start in range(0, length, chunk):
        count = min(chunk, length - start)
        tables = {column.name: column.read(start, count) for column in columns}
        for place in range(count):
            features = {name: table[place] for name, table in tables.items()}
            yield Row(f"{path}: entry {start + place}", features)


def _row_bytes(row: Row) -> int:
    return sum(values.nbytes for values in row.features.values())


def _as_int64_or_bytes(table: np.ndarray) -> np.ndarray:
    if table.dtype.kind == "b":
        return table.astype(np.int64)
    return np.char.encode(table, "utf-8") if table.dtype.kind == "U" else table


def _check_alike(
    values: np.ndarray | None, earlier: list[np.ndarray] | None, name: str, where: str
) -> np.ndarray:
    """Return the values of a feature if they can be stacked with those of earlier records."""
    if values is None or earlier is None:
        problem = "is missing here or in earlier records"
    elif earlier and len(values) != len(earlier[0]):
        problem = f"has {len(values):,} values, {len(earlier[0]):,} in the records before"
    elif earlier and values.dtype != earlier[0].dtype:
        problem = "differs in kind from the records before"
    elif values.dtype == object and any(value.endswith(b"\0") for value in values):
        problem = "ends with a zero byte, which numpy would drop"
    else:
        return values
    raise TableError(f"{where}: feature {name} {problem}; write .jsonl instead")


def _stack(name: str, values: list[Any]) -> np.ndarray:
    array = np.concatenate(values).reshape(len(values), -1)
    if array.dtype == object:
        lengths = [len(value) for value in array.ravel()]
        size = max(lengths, default=0) * len(lengths)  # numpy pads all to the longest
        if size > _CHUNK + _MAX_PADDING * sum(lengths):
            raise TableError(
                f"feature {name} would take {size} bytes for {sum(lengths)}, "
                "as all values get the length of the longest; write .jsonl instead"
            )
        array = array.astype("S")
    return array.reshape(len(values)) if array.shape[1] == 1 else array
