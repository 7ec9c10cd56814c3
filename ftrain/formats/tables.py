"""Tables: what all formats share: rows, the kinds of columns, lines of text and progress."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

MAX_LINE_BYTES = 1 << 26  # default limit of a line or a row of a table: 64 MiB
_INT64 = range(-(1 << 63), 1 << 63)
Item = TypeVar("Item")


class TableError(ValueError):
    """A table that cannot be read or written."""


class Row(NamedTuple):
    """One row: its place in a file for messages, and its features for `encode_example`."""

    where: str
    features: dict[str, Any]


class Progress(Protocol):
    """Reports the progress of reading files."""

    def follow(
        self, path: Path, items: Iterable[Item], size: Callable[[Item], int]
    ) -> Iterator[Item]:
        """Yield the items of a file; `size` returns the bytes of the file that an item takes."""
        ...


class NoProgress:
    """Reports nothing."""

    def follow(
        self, path: Path, items: Iterable[Item], size: Callable[[Item], int]
    ) -> Iterator[Item]:
        """Yield the items."""
        yield from items


# Called with a verb and the files to read, for each pass over them.
ShowProgress = Callable[[str, Sequence[Path]], AbstractContextManager[Progress]]


def hide_progress(verb: str, paths: Sequence[Path]) -> AbstractContextManager[Progress]:
    """Show no progress."""
    return nullcontext(NoProgress())


class ColumnKinds:
    """The kind of every feature over all rows: "int64", "float" or "bytes".

    Integers become floats where the feature also has floats.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        # The first integer of each feature beyond int64: no error if the feature becomes float.
        self._too_large: dict[str, tuple[str, int]] = {}

    def get(self, name: str) -> str | None:
        """Return the kind of a feature; None if it has no value so far."""
        return self._kinds.get(name)

    def set(self, name: str, kind: str) -> None:
        """Set the kind of a feature."""
        self._kinds[name] = kind

    def join(self, name: str, kind: str, where: str) -> None:
        """Combine with the kind in one more row; numbers and text do not combine."""
        known = self._kinds.setdefault(name, kind)
        if known == kind:
            return
        if "bytes" in (known, kind):
            found = "text" if kind == "bytes" else "numbers"
            earlier = "text" if known == "bytes" else "numbers"
            raise TableError(
                f"{where}: feature {name} is {found}, expected {earlier} as in the lines before; "
                "use one kind in all lines"
            )
        self._kinds[name] = "float"

    def note_range(self, name: str, values: Sequence[int], where: str) -> None:
        """Store the first integer of a feature that int64 cannot hold, for `check`."""
        for value in (min(values), max(values)):
            if value not in _INT64:
                self._too_large.setdefault(name, (where, value))

    def check(self) -> None:
        """Raise TableError if an integer feature has a value that int64 cannot hold."""
        for name, (where, value) in self._too_large.items():
            if self._kinds[name] == "int64":
                raise TableError(
                    f"{where}: feature {name} has the value {value}, beyond int64; "
                    "write it as a float, for example 1e20, or as text"
                )


def as_floats(values: Any, name: str, where: str) -> np.ndarray:
    """Return the values as float32, the type in Examples; TableError if one overflows."""
    try:
        wide = np.asarray(values, np.float64)
    except OverflowError:
        raise TableError(f"{where}: feature {name} has an integer beyond any float") from None
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    lost = np.isinf(narrow) & np.isfinite(wide)
    if lost.any():
        value = wide[lost].ravel()[0]
        raise TableError(
            f"{where}: feature {name} has the value {value}, beyond float32, the type in Examples"
        )
    return narrow


def read_lines(
    progress: Progress, path: Path, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[str]:
    """Yield every line of a file with its line end; TableError above `max_line_bytes`.

    Lines are decoded one by one, so that an error names the right line.
    """
    with open(path, "rb") as file:
        lines = iter(lambda: file.readline(max_line_bytes + 1), b"")
        for number, line in enumerate(progress.follow(path, lines, len), start=1):
            if len(line) > max_line_bytes:
                raise TableError(
                    f"{path}: line {number} has more than {max_line_bytes} bytes; "
                    "raise the limit with --max-record-bytes if that is intended"
                )
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = line[error.start] if error.start < len(line) else 0
                raise TableError(
                    f"{path}: line {number} is not UTF-8 (byte {error.start + 1} is {byte:#04x}); "
                    "convert the file to UTF-8"
                ) from None


def printable(name: str) -> str:
    """Return a name from a file for messages: printable, and at most 80 characters."""
    shown = name if name.isprintable() else ascii(name)[1:-1]
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
