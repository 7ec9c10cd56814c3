"""Mistakes of whoever typed a command about data."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftrain.storage import is_transient


class DataCommandError(ValueError):
    """What was asked for cannot be done, and why."""


def printable(name: str) -> str:
    """A name from a file for a message: without line ends or bytes that are no text, and not longer than a line."""
    shown = name if name.isprintable() else ascii(name)[1:-1]
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


@contextmanager
def told_with(way_out: str) -> Iterator[None]:
    """Tells of damage that is found, with a line on what to do about it."""
    from ftrain.formats.records.framing import DamagedRecordError

    try:
        yield
    except DamagedRecordError as error:
        error.add_note(way_out)
        raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Names the file in errors of the system that do not, as of a disk that is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or is_transient(error):
            raise
        raise DataCommandError(f"{path}: {error.strerror or error}") from None
