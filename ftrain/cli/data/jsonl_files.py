"""Lines of JSON, one object each: numbers, text and lists of them; bytes that are no text as {"base64": "..."}."""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ftrain.cli.data.column_kinds import ColumnKinds, as_floats
from ftrain.cli.data.errors import DataCommandError
from ftrain.cli.data.progress import Bar
from ftrain.cli.data.text_files import MAX_LINE_BYTES, Row, read_lines

_NAMES = {bool: "int64", int: "int64", float: "float", bytes: "bytes"}


def read_jsonl(paths: Sequence[Path], max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Row]:
    """The objects of files, in lines of up to `max_line_bytes`. A first reading finds out what each name stands for."""
    kinds = ColumnKinds()
    for where, features in _flat_rows("looking at", paths, max_line_bytes):
        for name, values in features.items():
            kind = _kind(values, name, where)
            if kind:
                kinds.join(name, kind, where)
            if kind == "int64":
                kinds.note_range(name, values, where)
    kinds.check()
    for where, features in _flat_rows("converting", paths, max_line_bytes):
        named = features.items()
        yield Row(
            where, {name: _as_array(kinds.get(name), values, name, where) for name, values in named}
        )


def write_jsonl(path: Path, single: set[str], rows: Iterator[Row]) -> int:
    """Writes rows of decoded Examples, those features that are `single` without brackets; how many there were."""
    count = 0
    with open(path, "x", encoding="utf-8", newline="\n") as file:
        for _, features in rows:
            line = {name: _as_json(values, name in single) for name, values in features.items()}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count


def find_single(rows: Iterable[Row]) -> set[str]:
    """The features of decoded Examples that have one value wherever they are."""
    single: set[str] = set()
    several: set[str] = set()
    for _, features in rows:
        single |= features.keys()
        several |= {name for name, values in features.items() if values is None or len(values) != 1}
    return single - several


def _flat_rows(verb: str, paths: Sequence[Path], limit: int) -> Iterator[Row]:
    """Every line, with the values of its features in flat lists; those that are null are left out."""
    with Bar(verb, paths) as bar:
        for path in paths:
            for number, line in enumerate(read_lines(bar, path, limit), start=1):
                if line.strip():
                    where = f"{path}: line {number}"
                    yield Row(where, _features(line, where))


def _features(line: str, where: str) -> dict[str, list[Any]]:
    try:
        named = _parse(line, where).items()
        return {name: _flatten(value, name, where) for name, value in named if value is not None}
    except RecursionError:
        raise DataCommandError(f"{where} has lists in lists too deep to be read") from None


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataCommandError(f"{where} is no JSON: {error.msg} at column {error.colno}") from None
    except ValueError:
        raise DataCommandError(
            f"{where} has a number of too many digits; write it as a float, such as 1e20"
        ) from None
    if not isinstance(found, dict):
        raise DataCommandError(
            f'{where} is a {type(found).__name__}, wanted an object such as {{"x": [1, 2]}}'
        )
    return found


def _flatten(value: Any, name: str, where: str) -> list[Any]:
    """The values of nested lists one after the other; an error unless the lists have one shape."""
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
        raise DataCommandError(
            f"{where}: feature {name} has lists of different lengths in a list; make it one flat list"
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
        raise DataCommandError(
            f"{where}: feature {name} is no text and no base64: {error}"
        ) from None
    found = {type(None): "null in a list", dict: "an object"}.get(type(value), f"{value!r}")
    raise DataCommandError(
        f'{where}: feature {name} is {found}, wanted numbers, text, {{"base64": "..."}}, or lists of one of them'
    )


def _kind(values: Sequence[Any], name: str, where: str) -> str | None:
    """The kind of flat values; None if there are none."""
    kinds = {_NAMES[kind] for kind in set(map(type, values))}
    if "bytes" in kinds and len(kinds) > 1:
        raise DataCommandError(
            f"{where}: feature {name} has text and numbers in one list; give them two names"
        )
    return "float" if "float" in kinds else next(iter(kinds), None)


def _as_array(kind: str | None, values: list[Any], name: str, where: str) -> np.ndarray | None:
    """The values in the kind that the feature has in all lines; None, a feature without a kind, if it never has any."""
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
        # By way of text, as a float32 has a shorter one than the same value as a float64.
        items = [float(text) for text in values.astype("U32").tolist()]
    else:
        items = [_text(item) if isinstance(item, bytes) else item for item in values.tolist()]
    return items[0] if single else items


def _text(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}
