"""Text tables: CSV, TSV and JSON lines. A first pass finds the kind of each feature.

The first line of a CSV or TSV file names the features, and an empty cell is a missing value. Each
line of a JSON lines file is an object of numbers, text and lists of them. Bytes that are not UTF-8
text are written as {"base64": "..."}.
"""

import base64
import binascii
import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ftrain.formats.tables import (
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

_MAX_SPARSITY = 1000  # cells per value of a table
_SMALL = 1 << 24  # cells; smaller tables may have any sparsity
# 007 is text: an integer would be written back as 7.
_INTEGER = re.compile(r"\s*[+-]?(0|[1-9][0-9]*)\s*")
_ZERO_PADDED = re.compile(r"\s*[+-]?0[0-9].*")
# The pattern matches digits in one way only: with two ways the time would be quadratic.
_NUMBER = re.compile(
    r"\s*[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf|infinity)\s*", re.IGNORECASE
)
_JSON_KINDS = {bool: "int64", int: "int64", float: "float", bytes: "bytes"}


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
    names = {path: _read_csv_names(path, delimiter, max_row_bytes, show) for path in paths}
    _check_same_names(names, paths)
    with show("scanning", paths) as progress:
        for path in paths:
            for where, cells in _read_csv_cells(progress, path, delimiter, max_row_bytes):
                for name, cell in zip(names[path], cells, strict=True):
                    _update_csv_kind(kinds, name, cell, where)
    kinds.check()
    with show("converting", paths) as progress:
        for path in paths:
            for where, cells in _read_csv_cells(progress, path, delimiter, max_row_bytes):
                named = zip(names[path], cells, strict=True)
                features = {
                    name: _parse_cell(kinds.get(name), cell, name, where)
                    for name, cell in named
                    if cell
                }
                yield Row(where, features)


def write_csv(path: Path, names: Sequence[str], rows: Iterator[Row], delimiter: str) -> int:
    """Write rows of decoded Examples, at most one value per cell; return their number."""
    count = 0
    with open(path, "x", encoding="utf-8", newline="") as file:
        plain = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        # The plain writer does not quote a carriage return, which would end the line.
        quoting = csv.writer(file, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        header = list(names)
        (quoting if any("\r" in name for name in header) else plain).writerow(header)
        for where, features in rows:
            cells = [_format_cell(features.get(name), name, where) for name in names]
            (quoting if any("\r" in cell for cell in cells) else plain).writerow(cells)
            count += 1
    return count


def find_columns(rows: Iterable[Row]) -> list[str]:
    """Return the sorted names of all features; TableError if one has several values in a row."""
    names: set[str] = set()
    count = 0
    value_count = 0
    for where, features in rows:
        names |= features.keys()
        count += 1
        value_count += len(features)
        for name, values in features.items():
            if values is not None and len(values) > 1:
                raise TableError(
                    f"{where}: feature {name} has {len(values):,} values, and a cell holds one; "
                    "write .jsonl or .npz instead"
                )
    if count * len(names) > _SMALL + _MAX_SPARSITY * value_count:
        raise TableError(
            f"a table of {count:,} rows of {len(names):,} columns would be nearly empty, "
            f"with {value_count:,} values; write .jsonl"
        )
    return sorted(names)


def _read_csv_cells(
    progress: Progress, path: Path, delimiter: str, limit: int
) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the cells of every row but the first."""
    rows = _read_csv_rows(progress, path, delimiter, limit)
    _, header = next(rows)
    for where, cells in rows:
        if len(cells) != len(header):
            raise TableError(
                f"{where} has {len(cells)} {'cell' if len(cells) == 1 else 'cells'}, "
                f"the first line {len(header)}; a cell that contains a delimiter needs quotes"
            )
        yield where, cells


def _read_csv_rows(
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


def _read_csv_names(path: Path, delimiter: str, limit: int, show: ShowProgress) -> list[str]:
    with show("scanning", [path]) as progress:
        where, names = next(_read_csv_rows(progress, path, delimiter, limit), ("", []))
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


def _update_csv_kind(kinds: ColumnKinds, name: str, cell: str, where: str) -> None:
    known = kinds.get(name)
    if not cell or known == "bytes":
        return
    if known != "float" and _INTEGER.fullmatch(cell):
        kinds.set(name, "int64")
        if len(cell) > 18:
            kinds.note_range(name, [_parse_integer(cell, name, where)], where)
    else:
        is_number = _NUMBER.fullmatch(cell) and not _ZERO_PADDED.fullmatch(cell)
        kinds.set(name, "float" if is_number else "bytes")


def _parse_integer(cell: str, name: str, where: str) -> int:
    try:
        return int(cell)
    except ValueError:  # Python limits the number of digits
        raise TableError(
            f"{where}: feature {name} is a number of {len(cell):,} digits, beyond any type"
        ) from None


def _parse_cell(kind: str | None, cell: str, name: str, where: str) -> int | bytes | np.ndarray:
    if kind == "int64":
        return int(cell)
    if kind != "float":
        return cell.encode()
    if math.isinf(value := float(cell)) and "inf" not in cell.lower():
        raise TableError(f"{where}: feature {name} has the value {cell}, beyond any float")
    return as_floats(value, name, where)


def _format_cell(values: np.ndarray | None, name: str, where: str) -> str:
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


def read_jsonl(
    paths: Sequence[Path],
    max_line_bytes: int = MAX_LINE_BYTES,
    show: ShowProgress = hide_progress,
) -> Iterator[Row]:
    """Yield the objects of files, in lines of up to `max_line_bytes`.

    A first pass finds the kind of each feature.
    """
    kinds = ColumnKinds()
    for where, features in _read_json_rows("scanning", paths, max_line_bytes, show):
        for name, values in features.items():
            kind = _kind_of_values(values, name, where)
            if kind:
                kinds.join(name, kind, where)
            if kind == "int64":
                kinds.note_range(name, values, where)
    kinds.check()
    for where, features in _read_json_rows("converting", paths, max_line_bytes, show):
        named = features.items()
        yield Row(
            where, {name: _as_array(kinds.get(name), values, name, where) for name, values in named}
        )


def write_jsonl(path: Path, single: set[str], rows: Iterator[Row]) -> int:
    """Write rows of decoded Examples, `single` features without brackets; return their number."""
    count = 0
    with open(path, "x", encoding="utf-8", newline="\n") as file:
        for _, features in rows:
            line = {
                name: _format_values(values, name in single) for name, values in features.items()
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count


def find_single(rows: Iterable[Row]) -> set[str]:
    """Return the features of decoded Examples that have one value in every row that has them."""
    single: set[str] = set()
    several: set[str] = set()
    for _, features in rows:
        single |= features.keys()
        several |= {name for name, values in features.items() if values is None or len(values) != 1}
    return single - several


def _read_json_rows(
    verb: str, paths: Sequence[Path], limit: int, show: ShowProgress
) -> Iterator[Row]:
    """Yield every line, with the values of each feature in a flat list; null is left out."""
    with show(verb, paths) as progress:
        for path in paths:
            for number, line in enumerate(read_lines(progress, path, limit), start=1):
                if line.strip():
                    where = f"{path}: line {number}"
                    yield Row(where, _parse_features(line, where))


def _parse_features(line: str, where: str) -> dict[str, list[Any]]:
    try:
        named = _parse_object(line, where).items()
        return {name: _flatten(value, name, where) for name, value in named if value is not None}
    except RecursionError:
        raise TableError(f"{where} has lists that are nested too deeply") from None


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise TableError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except ValueError:
        raise TableError(
            f"{where} has a number with too many digits; write it as a float, for example 1e20"
        ) from None
    if not isinstance(found, dict):
        raise TableError(
            f'{where} is a {type(found).__name__}, expected an object such as {{"x": [1, 2]}}'
        )
    return found


def _flatten(value: Any, name: str, where: str) -> list[Any]:
    """Return the values of nested lists, flattened; the lists must have one shape."""
    if not isinstance(value, list):
        return [_parse_scalar(value, name, where)]
    if value and set(map(type, value)) <= {int, float, bool}:
        return value
    flat: list[Any] = []
    _append_flat(value, flat, name, where)
    return flat


def _append_flat(value: Any, flat: list[Any], name: str, where: str) -> tuple[int, ...]:
    """Append the values of nested lists, each of them once, and return their shape."""
    if not isinstance(value, list):
        flat.append(_parse_scalar(value, name, where))
        return ()
    if value and set(map(type, value)) <= {int, float, bool}:
        flat += value
        return (len(value),)
    shapes = {_append_flat(part, flat, name, where) for part in value}
    if len(shapes) > 1:
        raise TableError(
            f"{where}: feature {name} has lists of different lengths in a list; "
            "make it one flat list"
        )
    return (len(value), *(shapes.pop() if shapes else ()))


def _parse_scalar(value: Any, name: str, where: str) -> int | float | bytes:
    if isinstance(value, bool | int | float):
        return value
    try:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, dict) and list(value) == ["base64"]:
            return base64.b64decode(value["base64"], validate=True)
    except (UnicodeEncodeError, binascii.Error, TypeError, ValueError) as error:
        raise TableError(f"{where}: feature {name} is neither text nor base64: {error}") from None
    found = {type(None): "null in a list", dict: "an object"}.get(type(value), f"{value!r}")
    raise TableError(
        f"{where}: feature {name} is {found}, "
        'expected numbers, text, {"base64": "..."}, or lists of one of them'
    )


def _kind_of_values(values: Sequence[Any], name: str, where: str) -> str | None:
    """Return the kind of flat values; None if the list is empty."""
    kinds = {_JSON_KINDS[kind] for kind in set(map(type, values))}
    if "bytes" in kinds and len(kinds) > 1:
        raise TableError(f"{where}: feature {name} has text and numbers in one list; use two names")
    return "float" if "float" in kinds else next(iter(kinds), None)


def _as_array(kind: str | None, values: list[Any], name: str, where: str) -> np.ndarray | None:
    """Return the values in the kind of the feature; None if the feature is empty in all lines."""
    if kind is None:
        return None
    if kind == "float":
        return as_floats(values, name, where)
    if kind == "int64":
        return np.array(values, np.int64)
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _format_values(values: np.ndarray | None, single: bool) -> Any:
    if values is None:
        return []
    if values.dtype.kind == "f":
        # Via text, because float32 has shorter decimals than the same value as float64.
        items = [float(text) for text in values.astype("U32").tolist()]
    else:
        items = [
            _format_bytes(item) if isinstance(item, bytes) else item for item in values.tolist()
        ]
    return items[0] if single else items


def _format_bytes(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}
