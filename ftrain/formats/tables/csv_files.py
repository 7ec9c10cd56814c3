"""CSV and TSV files: the first line names the features, an empty cell is a missing value."""

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ftrain.formats.tables.rows import (
    MAX_LINE_BYTES,
    ColumnKinds,
    Progress,
    Row,
    ShowProgress,
    TableError,
    as_floats,
    hide_progress,
    printable,
    read_lines,
)

_MAX_SPARSITY = 1000  # cells of a table for each value in it
_SMALL = 1 << 24  # cells that need no check of the sparsity
# 007 is a name: as an integer it would be written back as 7.
_INTEGER = re.compile(r"\s*[+-]?(0|[1-9][0-9]*)\s*")
_PADDED = re.compile(r"\s*[+-]?0[0-9].*")
# There is only one way to match digits: with two, the time would be quadratic.
_NUMBER = re.compile(
    r"\s*[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf|infinity)\s*", re.IGNORECASE
)


def read_csv(
    paths: Sequence[Path],
    delimiter: str,
    max_row_bytes: int = MAX_LINE_BYTES,
    show: ShowProgress = hide_progress,
) -> Iterator[Row]:
    """Yield the rows of tables with the same columns, each up to `max_row_bytes`.

    A first pass finds the kinds of the columns.
    """
    kinds = ColumnKinds()
    names = {path: _names(path, delimiter, max_row_bytes, show) for path in paths}
    _check_same_names(names, paths)
    with show("scanning", paths) as progress:
        for path in paths:
            for where, cells in _cells(progress, path, delimiter, max_row_bytes):
                for name, cell in zip(names[path], cells, strict=True):
                    _learn(kinds, name, cell, where)
    kinds.check()
    with show("converting", paths) as progress:
        for path in paths:
            for where, cells in _cells(progress, path, delimiter, max_row_bytes):
                named = zip(names[path], cells, strict=True)
                features = {
                    name: _value(kinds.get(name), cell, name, where) for name, cell in named if cell
                }
                yield Row(where, features)


def write_csv(path: Path, names: Sequence[str], rows: Iterator[Row], delimiter: str) -> int:
    """Write rows of decoded Examples, at most one value per cell; return their number."""
    count = 0
    with open(path, "x", encoding="utf-8", newline="") as file:
        plain = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        # The plain one does not quote a carriage return, which would end the line.
        quoting = csv.writer(file, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        header = list(names)
        (quoting if any("\r" in name for name in header) else plain).writerow(header)
        for where, features in rows:
            cells = [_cell(features.get(name), name, where) for name in names]
            (quoting if any("\r" in cell for cell in cells) else plain).writerow(cells)
            count += 1
    return count


def find_columns(rows: Iterable[Row]) -> list[str]:
    """Return the sorted names of all features; refuse a feature that does not fit into a cell."""
    names: set[str] = set()
    count = 0
    values_in_all = 0
    for where, features in rows:
        names |= features.keys()
        count += 1
        values_in_all += len(features)
        for name, values in features.items():
            if values is not None and len(values) > 1:
                raise TableError(
                    f"{where}: feature {name} has {len(values):,} values, and a cell holds one; "
                    "write .jsonl or .npz instead"
                )
    if count * len(names) > _SMALL + _MAX_SPARSITY * values_in_all:
        raise TableError(
            f"a table of {count:,} rows of {len(names):,} columns would be nearly empty, "
            f"with {values_in_all:,} values; write .jsonl"
        )
    return sorted(names)


def _cells(
    progress: Progress, path: Path, delimiter: str, limit: int
) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the cells of every row but the first."""
    rows = _rows(progress, path, delimiter, limit)
    _, header = next(rows)
    for where, cells in rows:
        if len(cells) != len(header):
            raise TableError(
                f"{where} has {len(cells)} {'cell' if len(cells) == 1 else 'cells'}, "
                f"the first line {len(header)}; a cell that contains a delimiter needs quotes"
            )
        yield where, cells


def _rows(
    progress: Progress, path: Path, delimiter: str, limit: int
) -> Iterator[tuple[str, list[str]]]:
    earlier = csv.field_size_limit(limit)
    line = 1
    size = 0

    def lines() -> Iterator[str]:
        nonlocal size
        for text in read_lines(progress, path, limit):
            size += len(text)
            if size > limit:  # most likely a quote is never closed
                raise TableError(
                    f"{path}: the row from line {line} on has more than {limit} bytes; "
                    "is a quotation mark missing? If not, raise the limit with --max-record-bytes"
                )
            yield text

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            size = 0
            if cells:  # skip empty lines
                yield f"{path}: line {line}", cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise TableError(f"{path}: line {line} cannot be read: {error}") from None
    finally:
        csv.field_size_limit(earlier)


def _check_same_names(names: Mapping[Path, list[str]], paths: Sequence[Path]) -> None:
    first = names[paths[0]]
    for path in paths:
        if sorted(names[path]) != sorted(first):
            differing = sorted(set(names[path]) ^ set(first))[0]
            raise TableError(
                f"{path} and {paths[0]}: only one has a column {differing}; convert them one by one"
            )


def _names(path: Path, delimiter: str, limit: int, show: ShowProgress) -> list[str]:
    with show("scanning", [path]) as progress:
        where, names = next(_rows(progress, path, delimiter, limit), ("", []))
    if not names:
        raise TableError(f"{path} is empty, expected a first line with the names of the columns")
    earlier: set[str] = set()
    for number, name in enumerate(names):
        if not name or name in earlier:
            problem = (
                f"a second column is named {printable(name)}"
                if name
                else f"column {number + 1} has no name"
            )
            raise TableError(f"{where}: {problem}; the first line must name each column once")
        earlier.add(name)
    return names


def _learn(kinds: ColumnKinds, name: str, cell: str, where: str) -> None:
    known = kinds.get(name)
    if not cell or known == "bytes":
        return
    if known != "float" and _INTEGER.fullmatch(cell):
        kinds.set(name, "int64")
        if len(cell) > 18:
            kinds.note_range(name, [_integer(cell, name, where)], where)
    else:
        is_number = _NUMBER.fullmatch(cell) and not _PADDED.fullmatch(cell)
        kinds.set(name, "float" if is_number else "bytes")


def _integer(cell: str, name: str, where: str) -> int:
    try:
        return int(cell)
    except ValueError:  # Python limits the number of digits
        raise TableError(
            f"{where}: feature {name} is a number of {len(cell):,} digits, beyond any type"
        ) from None


def _value(kind: str | None, cell: str, name: str, where: str) -> int | bytes | np.ndarray:
    if kind == "int64":
        return int(cell)
    if kind != "float":
        return cell.encode()
    if math.isinf(value := float(cell)) and "inf" not in cell.lower():
        raise TableError(f"{where}: feature {name} has the value {cell}, beyond any float")
    return as_floats(value, name, where)


def _cell(values: np.ndarray | None, name: str, where: str) -> str:
    if values is None or not len(values):
        return ""
    value = values[0]
    if not isinstance(value, bytes):
        return str(value)  # for a float32, the shortest text that reads back the same
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise TableError(
            f"{where}: feature {name} has bytes that are not UTF-8 text; write .jsonl instead"
        ) from None
