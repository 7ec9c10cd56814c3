"""A guessed schema as tables and as a spec to paste, and records with shortened values."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from ftrain.cli.output import print_table, show_bytes, show_number

if TYPE_CHECKING:
    import numpy as np

    from ftrain.formats.examples.guessing import FeatureGuess, SchemaGuess

_MAX_VALUES = 6  # shown of a feature
_MAX_TEXT = 60  # characters
_MAX_RAW = 16  # bytes


def print_guess(guess: "SchemaGuess") -> None:
    """Print tables of the features, and the lines of a spec."""
    if guess.kind == "other":
        typer.echo(f"\nthe records are not Examples (none of the first {guess.records:,} is)")
        return
    others = f"; {guess.others:,} of them are not Examples" if guess.others else ""
    what = "context" if guess.kind == "sequence" else "features"
    _print_features(f"{what}, from {guess.records:,} records{others}", guess.features)
    if guess.lists:
        _print_features("feature lists, values of each step", guess.lists)
    typer.echo("\n" + "\n".join(spec_lines(guess)))


def print_record(title: str, record: bytes, guess: "SchemaGuess") -> None:
    """Print one record: its features, or its first bytes if it is not an Example."""
    from ftrain.formats.examples.guessing import record_kind
    from ftrain.formats.examples.messages import decode_sequence_example

    typer.echo(f"\n{title}, {show_bytes(len(record))}")
    if guess.kind == "other" or record_kind(record) == "other":
        typer.echo(f"  {_shorten_bytes(record)}")
        return
    context, lists = decode_sequence_example(record)
    for name, values in context.items():
        typer.echo(f"  {_printable(name)}: {_shorten(values)}")
    for name, steps in lists.items():
        first = f", the first: {_shorten(steps[0])}" if steps else ""
        typer.echo(
            f"  {_printable(name)}: {len(steps)} {'step' if len(steps) == 1 else 'steps'}{first}"
        )


def spec_lines(guess: "SchemaGuess") -> list[str]:
    """Return Python code of the spec, and of that of feature lists."""
    named = {"spec": guess.features} | ({"sequence": guess.lists} if guess.lists else {})
    entries = [*guess.spec.values(), *guess.sequence_spec.values()]
    steps = [entry.step for entry in entries if hasattr(entry, "step")]
    kinds = sorted({type(entry).__name__ for entry in [*entries, *steps]})
    lines = [f"from ftrain.formats import {', '.join(kinds)}", ""] if kinds else []
    for name, guesses in named.items():
        lines += [
            f"{name} = {{",
            *(f"    {_spec_line(key, found)}" for key, found in guesses.items()),
            "}",
        ]
    return lines


def format_entry(entry: Any) -> str:
    """Return an entry of a spec as Python code."""
    parts = []
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if dataclasses.is_dataclass(value):
            text = format_entry(value)
        else:
            text = _quoted(value) if isinstance(value, str) else repr(value)
        if field.name in ("shape", "dtype", "step"):
            parts.append(text)
        elif value != field.default:
            parts.append(f"{field.name}={text}")
    return f"{type(entry).__name__}({', '.join(parts)})"


def _spec_line(name: str, guess: "FeatureGuess") -> str:
    if guess.entry is None:
        why = f"its values are {_kind(guess)}" if guess.kinds else "it has no values"
        return f"# {_quoted(name)}: {why}"
    return f"{_quoted(name)}: {format_entry(guess.entry)},"


def _quoted(text: str) -> str:
    """Return text as a Python literal, in double quotes unless that needs escapes."""
    return f'"{text}"' if repr(text) == f"'{text}'" and '"' not in text else repr(text)


def _print_features(title: str, guesses: "Mapping[str, FeatureGuess]") -> None:
    from rich.table import Table

    has_steps = any(guess.steps for guess in guesses.values())
    typer.echo(f"\n{title}")
    table = Table(box=None)
    for column in (
        "name",
        "kind",
        *(["steps"] if has_steps else []),
        "values",
        "missing",
        "range",
        "spec",
    ):
        table.add_column(column, overflow="fold")
    for name, guess in guesses.items():
        steps = [_span(guess.steps or (0, 0))] if has_steps else []
        total = guess.missing + guess.present
        missing = f"{guess.missing / total:.1%}" if guess.missing else ""
        values = _span(guess.counts) if guess.present else ""
        table.add_row(
            _printable(name), _kind(guess), *steps, values, missing, _looks(guess), _entry(guess)
        )
    print_table(table)


def _kind(guess: "FeatureGuess") -> str:
    return " or ".join(sorted(guess.kinds)) or "none"


def _entry(guess: "FeatureGuess") -> str:
    return format_entry(guess.entry) if guess.entry else ""


def _looks(guess: "FeatureGuess") -> str:
    if len(guess.kinds) != 1 or guess.range is None:
        return f"{guess.nonfinite:,} non-finite" if guess.nonfinite else ""
    if "bytes" in guess.kinds:
        return _looks_of_bytes(guess, (int(guess.range[0]), int(guess.range[1])))
    low, high = (
        f"{value}" if "int64" in guess.kinds else show_number(value) for value in guess.range
    )
    nonfinite = f", {guess.nonfinite:,} non-finite" if guess.nonfinite else ""
    return (low if low == high else f"{low} to {high}") + nonfinite


def _looks_of_bytes(guess: "FeatureGuess", lengths: tuple[int, int]) -> str:
    looks = " and ".join(sorted(guess.looks)) or "empty"
    shapes = sorted({shape for shape in guess.image_shapes if shape})
    size = (
        f" {shapes[0][0]} x {shapes[0][1]}"
        if len(shapes) == 1
        else f" of {len(shapes)} sizes"
        if shapes
        else ""
    )
    return f"{looks}{size}, {_span(lengths)} {'byte' if lengths == (1, 1) else 'bytes'}"


def _span(ends: tuple[int, int]) -> str:
    return f"{ends[0]:,}" if ends[0] == ends[1] else f"{ends[0]:,} to {ends[1]:,}"


def _shorten(values: "np.ndarray | None") -> str:
    """Return the first values, and their number if there are more."""
    if values is None:
        return "no values"
    shown = [_shorten_value(value) for value in values[:_MAX_VALUES]]
    if len(values) == 1:
        return shown[0]
    more = f", ... {len(values):,} values" if len(values) > _MAX_VALUES else ""
    return f"[{', '.join(shown)}{more}]"


def _shorten_value(value: Any) -> str:
    if isinstance(value, bytes):
        return _shorten_bytes(value)
    return show_number(value) if value.dtype.kind == "f" else f"{value}"


def _shorten_bytes(value: bytes) -> str:
    from ftrain.formats.examples.guessing import look_of
    from ftrain.formats.examples.images import image_shape

    look = look_of(value)
    if look in ("PNG", "JPEG"):
        shape = image_shape(value)
        sides = f" {shape[0]} x {shape[1]} x {shape[2]}" if shape else ""
        return f"{look}{sides}, {show_bytes(len(value))}"
    if look == "raw":
        more = f" ... {len(value):,} bytes" if len(value) > _MAX_RAW else ""
        return f"{value[:_MAX_RAW].hex(' ')}{more}"
    text = value.decode()
    return (
        _quoted(text)
        if len(text) <= _MAX_TEXT
        else f"{_quoted(text[:_MAX_TEXT])} ... {len(text):,} characters"
    )


def _printable(text: str) -> str:
    return text if text.isprintable() and text else repr(text)
