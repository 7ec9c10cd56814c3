"""Tables of text: the first line names the features, an empty cell is a missing one."""

import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ftrain.cli.data.column_kinds import ColumnKinds, as_floats
from ftrain.cli.data.errors import DataCommandError, printable
from ftrain.cli.data.progress import Bar
from ftrain.cli.data.text_files import MAX_LINE_BYTES, Row, read_lines

_SPARSE = 1000  # cells that a table may have for each value in it
_SMALL = 1 << 24  # cells that do no harm
_INTEGER = re.compile(r"\s*[+-]?(0|[1-9][0-9]*)\s*")  # 007 is a name, and would come back as 7
_PADDED = re.compile(r"\s*[+-]?0[0-9].*")
# Without two ways to match the same digits, which would take time quadratic in their number.
_NUMBER = re.compile(
    r"\s*[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf|infinity)\s*", re.IGNORECASE
)


def read_csv(
    paths: Sequence[Path], delimiter: str, max_row_bytes: int = MAX_LINE_BYTES
) -> Iterator[Row]:
    """The rows of tables with the same columns, each up to `max_row_bytes`. A first reading finds their kinds."""
    kinds, names = ColumnKinds(), _common_names(paths, delimiter, max_row_bytes)
    with Bar("looking at", paths) as bar:
        for path in paths:
            for where, cells in _cells(bar, path, delimiter, max_row_bytes):
                for name, cell in zip(names[path], cells, strict=True):
                    _learn(kinds, name, cell, where)
    kinds.check()
    with Bar("converting", paths) as bar:
        for path in paths:
            for where, cells in _cells(bar, path, delimiter, max_row_bytes):
                named = zip(names[path], cells, strict=True)
                yield Row(
                    where,
                    {
                        name: _value(kinds.get(name), cell, name, where)
                        for name, cell in named
                        if cell
                    },
                )


def write_csv(path: Path, names: Sequence[str], rows: Iterator[Row], delimiter: str) -> int:
    """Writes rows of decoded Examples, one value to a cell at most; how many there were."""
    count = 0
    with open(path, "x", encoding="utf-8", newline="") as file:
        usual = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        # The usual one leaves a carriage return without quotation marks, where it would end the line.
        quoting = csv.writer(file, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        header = list(names)
        (quoting if any("\r" in name for name in header) else usual).writerow(header)
        for where, features in rows:
            cells = [_cell(features.get(name), name, where) for name in names]
            (quoting if any("\r" in cell for cell in cells) else usual).writerow(cells)
            count += 1
    return count


def find_columns(rows: Iterable[Row]) -> list[str]:
    """The names of all features of decoded Examples; an error if one does not fit into a cell."""
    names: set[str] = set()
    count, values_in_all = 0, 0
    for where, features in rows:
        names |= features.keys()
        count += 1
        values_in_all += len(features)
        for name, values in features.items():
            if values is not None and len(values) > 1:
                found = f"feature {name} has {len(values):,} values, and a cell holds one"
                raise DataCommandError(f"{where}: {found}; write .jsonl or .npz instead")
    if count * len(names) > _SMALL + _SPARSE * values_in_all:
        size = f"{count:,} rows of {len(names):,} columns"
        raise DataCommandError(
            f"a table of {size} would be nearly empty, with {values_in_all:,} values; write .jsonl"
        )
    return sorted(names)


def _cells(bar: Bar, path: Path, delimiter: str, limit: int) -> Iterator[tuple[str, list[str]]]:
    """The place and the cells of every row but the first."""
    rows = _rows(bar, path, delimiter, limit)
    _, header = next(rows)
    for where, cells in rows:
        if len(cells) != len(header):
            raise DataCommandError(
                f"{where} has {len(cells)} {'cell' if len(cells) == 1 else 'cells'}, the first line {len(header)}; "
                "a cell with a delimiter in it needs quotation marks"
            )
        yield where, cells


def _rows(bar: Bar, path: Path, delimiter: str, limit: int) -> Iterator[tuple[str, list[str]]]:
    earlier = csv.field_size_limit(limit)
    line, size = 1, 0

    def lines() -> Iterator[str]:
        nonlocal size
        for text in read_lines(bar, path, limit):
            size += len(text)
            if size > limit:  # a quotation mark that is never closed is more likely
                raise DataCommandError(
                    f"{path}: the row from line {line} on has more than {limit} bytes; is a quotation mark missing? "
                    "If not, raise the limit with --max-record-bytes"
                )
            yield text

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            size = 0
            if cells:  # a line without anything in it is none
                yield f"{path}: line {line}", cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataCommandError(f"{path}: line {line} cannot be read: {error}") from None
    finally:
        csv.field_size_limit(earlier)


def _common_names(paths: Sequence[Path], delimiter: str, limit: int) -> dict[Path, list[str]]:
    names = {path: _names(path, delimiter, limit) for path in paths}
    first = names[paths[0]]
    for path in paths:
        if sorted(names[path]) != sorted(first):
            differing = sorted(set(names[path]) ^ set(first))[0]
            raise DataCommandError(
                f"{path} and {paths[0]}: only one has a column {differing}; convert them one by one"
            )
    return names


def _names(path: Path, delimiter: str, limit: int) -> list[str]:
    with Bar("looking at", [path]) as bar:
        where, names = next(_rows(bar, path, delimiter, limit), ("", []))
    if not names:
        raise DataCommandError(
            f"{path} is empty; wanted is a first line with the names of the columns"
        )
    earlier: set[str] = set()
    for number, name in enumerate(names):
        if not name or name in earlier:
            problem = (
                f"a second column is named {printable(name)}"
                if name
                else f"column {number + 1} has no name"
            )
            raise DataCommandError(
                f"{where}: {problem}; the first line gives each a name of its own"
            )
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
    except ValueError:  # Python converts no more than some thousands of digits
        raise DataCommandError(
            f"{where}: feature {name} is a number of {len(cell):,} digits; it fits nowhere"
        ) from None


def _value(kind: str | None, cell: str, name: str, where: str) -> int | bytes | np.ndarray:
    if kind == "int64":
        return int(cell)
    if kind != "float":
        return cell.encode()
    if math.isinf(value := float(cell)) and "inf" not in cell.lower():
        raise DataCommandError(f"{where}: feature {name} has the value {cell}, beyond any float")
    return as_floats(value, name, where)


def _cell(values: np.ndarray | None, name: str, where: str) -> str:
    if values is None or not len(values):
        return ""
    value = values[0]
    if not isinstance(value, bytes):
        return str(value)  # of a float32 the shortest that reads back the same
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise DataCommandError(
            f"{where}: feature {name} has bytes that are no UTF-8 text; write .jsonl instead"
        ) from None
