"""The command `ftrain data`, run in this process, and files for it."""

import contextlib
import io
import signal
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from ftrain.cli import main
from ftrain.formats.examples.messages import decode_example, encode_example
from ftrain.formats.records.reading import read_records
from ftrain.formats.records.writing import RecordWriter

EVENT = b"\x09\x00\x00\x00\x00\x00\x00\xf0\x3f\x1a\rbrain.Event:2"


def data(*arguments, code: int = 0) -> str:
    """What the command prints, run in this process; on the standard error if it was a mistake."""
    out, err = io.StringIO(), io.StringIO()
    words = ["ftrain", "data", *map(str, arguments)]
    kept = patch.multiple(sys, argv=words, unraisablehook=sys.unraisablehook, path=[*sys.path])
    handler = signal.getsignal(signal.SIGINT)
    with kept, patch.object(warnings, "showwarning", warnings.showwarning):
        try:
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                pytest.raises(SystemExit) as ending,
            ):
                main()
        finally:
            signal.signal(signal.SIGINT, handler)
    assert (ending.value.code or 0) == code, err.getvalue()
    return err.getvalue() or out.getvalue()


def write(path: Path, records, **options) -> Path:
    with RecordWriter(path, **options) as writer:
        for record in records:
            writer.write(record)
    return writer.paths[0]


def features_of(path: Path) -> list[dict]:
    return [decode_example(record) for record in read_records(path)]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def example(number: int) -> bytes:
    values = {
        "x": np.arange(64) / 2 + number,
        "label": number,
        "words": np.arange(number % 3 + 1),
        "name": b"zebra",
    }
    return encode_example(values)


def damage(path: Path, *places: int) -> Path:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 1
    path.write_bytes(content)
    return path


def write_examples(directory: Path) -> Path:
    return write(directory / "train.tfrecord", [example(number) for number in range(20)])
