"""Text: the lines of files, read by number."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ftrain.data.source import Batch
from ftrain.formats import match_files
from ftrain.formats.examples.columns import as_objects
from ftrain.formats.records.files import MappedFiles
from ftrain.paths import absolute

_CHUNK = 16 << 20  # bytes searched for line ends at once


class TextSource:
    """The lines of text files, without line ends, as feature "text".

    They are str objects, or bytes with `encoding=None`. `files` is a path, a pattern such as
    "data/*.txt", or several. The files are scanned once for line starts, which takes 16 bytes of
    memory per line; the lines themselves are read on demand.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        *,
        encoding: str | None = "utf-8",
        skip_empty: bool = False,
        name: str = "text",
    ):
        self.paths = [absolute(path) for path in match_files(files)]
        self.encoding = encoding
        self.name = name
        self._marks = [
            (status.st_size, status.st_mtime_ns) for status in (path.stat() for path in self.paths)
        ]
        self._lines = [_find_lines(path, skip_empty) for path in self.paths]
        self._starts = np.cumsum([0, *map(len, self._lines)])
        self._maps = MappedFiles()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        first = self.paths[0]
        return (
            f"TextSource({first})"
            if len(self.paths) == 1
            else f"TextSource({first} and {len(self.paths) - 1} more)"
        )

    def where(self, index: int) -> str:
        """Return the file and the number of a line for messages."""
        number = self._file_of(index)
        first = int(self._lines[number][index - self._starts[number]][0])
        line = self._bytes(number, 0, first).count(b"\n") + 1
        return f"{self.paths[number]}: line {line}"

    def read(self, indices: np.ndarray) -> Batch:
        """Return the lines at `indices`."""
        return {self.name: as_objects([self._line(int(index)) for index in indices])}

    def _line(self, index: int) -> str | bytes:
        number = self._file_of(index)
        start, end = self._lines[number][index - self._starts[number]]
        line = self._bytes(number, start, end)
        if self.encoding is None:
            return line
        try:
            return line.decode(self.encoding)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.where(index)} is not {self.encoding}: {error}; encoding=None gives bytes"
            ) from None

    def _file_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"{self!r} has {len(self)} lines, but line {index} was requested")
        return int(np.searchsorted(self._starts, index, "right")) - 1

    def _bytes(self, number: int, start: int, end: int) -> bytes:
        return (
            self._maps.get(self.paths[number], *self._marks[number])[start:end]
            if end > start
            else b""
        )


def _find_lines(path: Path, skip_empty: bool) -> np.ndarray:
    """Return the start and the end of each line, without the line end."""
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    parts = [
        np.flatnonzero(data[at : at + _CHUNK] == ord("\n")) + at
        for at in range(0, len(data), _CHUNK)
    ]
    ends = np.concatenate([np.empty(0, np.int64), *parts])
    if len(data) and data[-1] != ord("\n"):
        ends = np.append(ends, len(data))
    starts = np.concatenate([np.zeros(min(len(ends), 1), np.int64), ends[:-1] + 1])
    has_return = (
        (ends > starts) & (data[np.maximum(ends, 1) - 1] == ord("\r"))
        if len(ends)
        else np.empty(0, bool)
    )
    lines = np.stack([starts, ends - has_return], axis=1)
    return lines[lines[:, 1] > lines[:, 0]] if skip_empty else lines
