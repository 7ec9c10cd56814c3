"""numpy's archives of arrays: the entries of all arrays at one place of their first axis are one record."""

import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from ftrain.cli.data.column_kinds import as_floats
from ftrain.cli.data.errors import DataCommandError, printable
from ftrain.cli.data.progress import Bar
from ftrain.cli.data.text_files import Row
from ftrain.formats.npy import NpyHeader, as_value_error, check_compression, read_npy_header
from ftrain.formats.records.framing import MAX_RECORD_BYTES

_CHUNK = 1 << 20  # bytes of all arrays together that are read at once, more or less
_MOST_EMPTY = 1 << 20  # records that take no bytes of the archive
_UNFOLDING = (
    64  # how many times as many bytes as its values an array of bytes of one length may have
)


def read_npz(paths: Sequence[Path], max_record_bytes: int = MAX_RECORD_BYTES) -> Iterator[Row]:
    """The entries of archives whose arrays have the same names and kinds.

    Entries are read some at a time, up to `max_record_bytes` for one entry of one array. Arrays in Fortran order are
    read whole, up to `max_record_bytes` each.
    """
    first: dict[str, str] | None = None
    with Bar("converting", paths) as bar:
        for path in paths:
            with _open(path) as archive, ExitStack() as members:
                columns = [
                    _Column(path, archive, info, members, max_record_bytes)
                    for info in archive.infolist()
                ]
                kinds = {column.name: column.kind for column in columns}
                if len(kinds) < len(columns) or "" in kinds:
                    raise DataCommandError(
                        f"{path}: two of its arrays have the same name, or one has none"
                    )
                first = kinds if first is None else first
                if kinds != first:
                    raise DataCommandError(
                        f"{path}: its arrays are {kinds}, those of {paths[0]} {first}; wanted the same"
                    )
                yield from bar.follow(path, _rows(path, columns), _size)


def write_npz(path: Path, rows: Iterator[Row]) -> int:
    """Writes rows of decoded Examples with features of one shape each; how many there were."""
    columns: dict[str, list[np.ndarray]] = {}
    count = 0
    for where, features in rows:
        if not count:
            columns = {name: [] for name in features}
        for name in columns.keys() | features.keys():
            values = features.get(name)
            _check(values, columns.get(name), name, where)
            columns[name].append(values)  # pyright: ignore[reportArgumentType] - None is refused by _check
        count += 1
    with zipfile.ZipFile(path, "x", allowZip64=True) as archive:
        for name in sorted(columns):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, _stack(name, columns.pop(name)))
    return count


class _Column:
    """One array of an archive, read from its start to its end."""

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
        with _refusing(f"{self._where} cannot be read"):
            check_compression(member)
            self._file: IO[bytes] = members.enter_context(archive.open(member))
            header = read_npy_header(self._file)
        shape, by_columns, self.dtype = header
        kinds = {"f": "float", "i": "int64", "u": "int64", "b": "int64", "S": "bytes", "U": "bytes"}
        if self.dtype.kind not in kinds:
            raise DataCommandError(
                f"{self._where} is of dtype {self.dtype}, wanted numbers, bytes ('S') or text ('U')"
            )
        if not shape:
            raise DataCommandError(
                f"{self._where} is a single value, wanted an array with one entry for each record"
            )
        self.kind, self.length, self._width = kinds[self.dtype.kind], shape[0], math.prod(shape[1:])
        self._check_size(header, member, limit)
        self._whole = self._read_by_columns(shape) if by_columns and len(shape) > 1 else None

    @property
    def entry_bytes(self) -> int:
        return self._width * self.dtype.itemsize

    def read(self, start: int, count: int) -> np.ndarray:
        """The entries from `start` on, as rows; it begins where the last call ended."""
        table = (
            self._read(count * self._width).reshape(count, self._width)
            if self._whole is None
            else self._whole
        )
        table = table if self._whole is None else table[start : start + count]
        if self.kind == "float":
            return as_floats(table, self.name, self._where)
        try:
            return _without_text(table)
        except ValueError as error:
            raise DataCommandError(f"{self._where} has text that is no Unicode: {error}") from None

    def _check_size(self, header: NpyHeader, member: zipfile.ZipInfo, limit: int) -> None:
        """Refuse what is not in the archive or takes too much memory, before any is taken."""
        if header.bytes > member.file_size:
            raise DataCommandError(
                f"{self._where} is cut short: its shape {header.shape} takes {header.bytes} bytes, and there are fewer"
            )
        size = header.bytes if header.is_fortran and len(header.shape) > 1 else self.entry_bytes
        if size > limit:
            what = "takes" if header.is_fortran else "has entries of"
            raise DataCommandError(
                f"{self._where} {what} {size} bytes, more than {limit}; raise the limit with --max-record-bytes"
            )

    def _read(self, count: int) -> np.ndarray:
        wanted = count * self.dtype.itemsize
        with _refusing(f"{self._where} is damaged"):
            data = self._file.read(wanted)
        if len(data) != wanted:
            raise DataCommandError(f"{self._where} is cut short")
        return np.frombuffer(data, self.dtype) if wanted else np.zeros(count, self.dtype)

    def _read_by_columns(self, shape: tuple[int, ...]) -> np.ndarray:
        """All of an array that does not lie in the file entry by entry."""
        return self._read(math.prod(shape)).reshape(shape[::-1]).T.reshape(shape[0], -1)


def _open(path: Path) -> zipfile.ZipFile:
    with _refusing(f"{path} is no .npz file, or damaged"):
        return zipfile.ZipFile(path)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        with as_value_error(what):
            yield
    except ValueError as error:
        raise DataCommandError(f"{error}") from None


def _rows(path: Path, columns: Sequence[_Column]) -> Iterator[Row]:
    if not columns:
        raise DataCommandError(f"{path} has no arrays")
    lengths = {column.name: column.length for column in columns}
    if len(set(lengths.values())) > 1:
        raise DataCommandError(
            f"{path}: its arrays have different lengths, {lengths}; wanted one entry for each record"
        )
    length, size = columns[0].length, sum(column.entry_bytes for column in columns)
    if not size and length > _MOST_EMPTY:
        raise DataCommandError(
            f"{path}: its {length} entries take no bytes, and up to {_MOST_EMPTY} of such are converted"
        )
    chunk = max(_CHUNK // (size + len(columns)), 1)
    for start in range(0, length, chunk):
        tables = {column.name: column.read(start, min(chunk, length - start)) for column in columns}
        for place in range(min(chunk, length - start)):
            yield Row(
                f"{path}: entry {start + place}",
                {name: table[place] for name, table in tables.items()},
            )


def _size(row: Row) -> int:
    return sum(values.nbytes for values in row.features.values())


def _without_text(table: np.ndarray) -> np.ndarray:
    if table.dtype.kind == "b":
        return table.astype(np.int64)
    return np.char.encode(table, "utf-8") if table.dtype.kind == "U" else table


def _check(
    values: np.ndarray | None, earlier: list[np.ndarray] | None, name: str, where: str
) -> None:
    """An error if the values of a feature cannot be stacked upon those of the records before."""
    if values is None or earlier is None:
        problem = "is missing in it or in others before"
    elif earlier and len(values) != len(earlier[0]):
        problem = f"has {len(values):,} values, {len(earlier[0]):,} in the records before"
    elif earlier and values.dtype != earlier[0].dtype:
        problem = "has another kind than in the records before"
    elif values.dtype == object and any(value.endswith(b"\0") for value in values):
        problem = "ends with a zero byte, which numpy would drop"
    else:
        return
    raise DataCommandError(f"{where}: feature {name} {problem}; write .jsonl instead")


def _stack(name: str, values: list[Any]) -> np.ndarray:
    array = np.concatenate(values).reshape(len(values), -1)
    if array.dtype == object:
        lengths = [len(value) for value in array.ravel()]
        size = max(lengths, default=0) * len(lengths)  # all get the length of the longest
        if size > _CHUNK + _UNFOLDING * sum(lengths):
            raise DataCommandError(
                f"feature {name} would take {size} bytes for {sum(lengths)}, as all values get the length of the "
                "longest; write .jsonl instead"
            )
        array = array.astype("S")
    return array.reshape(len(values)) if array.shape[1] == 1 else array
