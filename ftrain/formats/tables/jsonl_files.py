"""JSON lines: one object per line, of numbers, text and lists of them.

Bytes that are not UTF-8 text are written as {"base64": "..."}.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ftrain.formats.tables.rows import (
    MAX_LINE_BYTES,
    ColumnKinds,
    Row,
    ShowProgress,
    TableError,
    as_floats,
    hide_progress,
    read_lines,
)

_KINDS = {bool: "int64", int: "int64", float: "float", bytes: "bytes"}


def read_jsonl(
    paths: Sequence[Path],
    max_line_bytes: int = MAX_LINE_BYTES,
    show: ShowProgress = hide_progress,
) -> Iterator[Row]:
    """Yield the objects of files, in lines of up to `max_line_bytes`.

    A first pass finds the kind of each feature.
    """
    kinds = ColumnKinds()
    for where, features in _flat_rows("scanning", paths, max_line_bytes, show):
        for name, values in features.items():
            kind = _kind(values, name, where)
            if kind:
                kinds.join(name, kind, where)
            if kind == "int64":
                kinds.note_range(name, values, where)
    kinds.check()
    for where, features in _flat_rows("converting", paths, max_line_bytes, show):
        named = features.items()
        yield Row(
            where, {name: _as_array(kinds.get(name), values, name, where) for name, values in named}
        )


def write_jsonl(path: Path, single: set[str], rows: Iterator[Row]) -> int:
    """Write rows of decoded Examples, `single` features without brackets; return their number."""
    count = 0
    with open(path, "x", encoding="utf-8", newline="\n") as file:
        for _, features in rows:
            line = {name: _as_json(values, name in single) for name, values in features.items()}
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


def _flat_rows(verb: str, paths: Sequence[Path], limit: int, show: ShowProgress) -> Iterator[Row]:
    """Yield every line, with the values of each feature in a flat list; null is left out."""
    with show(verb, paths) as progress:
        for path in paths:
            for number, line in enumerate(read_lines(progress, path, limit), start=1):
                if line.strip():
                    where = f"{path}: line {number}"
                    yield Row(where, _features(line, where))


def _features(line: str, where: str) -> dict[str, list[Any]]:
    try:
        named = _parse(line, where).items()
        return {name: _flatten(value, name, where) for name, value in named if value is not None}
    except RecursionError:
        raise TableError(f"{where} has lists that are nested too deeply") from None


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise TableError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except ValueError:
        raise TableError(
            f"{where} has a number of too many digits; write it as a float, such as 1e20"
        ) from None
    if not isinstance(found, dict):
        raise TableError(
            f'{where} is a {type(found).__name__}, expected an object such as {{"x": [1, 2]}}'
        )
    return found


def _flatten(value: Any, name: str, where: str) -> list[Any]:
    """Return the values of nested lists, flattened; the lists must have one shape."""
    if not isinstance(value, list):
        return [_scalar(value, name, where)]
    if value and set(map(type, value)) <= {int, float, bool}:
        return value
    flat: list[Any] = []
    _append(value, flat, name, where)
    return flat


def _append(value: Any, flat: list[Any], name: str, where: str) -> tuple[int, ...]:
    """Append the values of nested lists, each of them once, and return their shape."""
    if not isinstance(value, list):
        flat.append(_scalar(value, name, where))
        return ()
    if value and set(map(type, value)) <= {int, float, bool}:
        flat += value
        return (len(value),)
    shapes = {_append(part, flat, name, where) for part in value}
    if len(shapes) > 1:
        raise TableError(
            f"{where}: feature {name} has lists of different lengths in a list; "
            "make it one flat list"
        )
    return (len(value), *(shapes.pop() if shapes else ()))


def _scalar(value: Any, name: str, where: str) -> int | float | bytes:
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


def _kind(values: Sequence[Any], name: str, where: str) -> str | None:
    """Return the kind of flat values; None if the list is empty."""
    kinds = {_KINDS[kind] for kind in set(map(type, values))}
    if "bytes" in kinds and len(kinds) > 1:
        raise TableError(
            f"{where}: feature {name} has text and numbers in one list; give them two names"
        )
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


def _as_json(values: np.ndarray | None, single: bool) -> Any:
    if values is None:
        return []
    if values.dtype.kind == "f":
        # Via text, because float32 has shorter decimals than the same value as float64.
        items = [float(text) for text in values.astype("U32").tolist()]
    else:
        items = [_text(item) if isinstance(item, bytes) else item for item in values.tolist()]
    return items[0] if single else items


def _text(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}
