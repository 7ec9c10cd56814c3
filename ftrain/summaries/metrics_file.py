"""metrics.jsonl: one line of JSON for each write of metrics, for scripts and notebooks."""

import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from ftrain.paths import local_path
from ftrain.storage import replacing
from ftrain.summaries.writer import plain_step, plain_value

MAX_LINE_BYTES = 1 << 26  # 64 MiB
BAD_SUFFIX = ".bad"  # of the file beside it that gets the unreadable lines
_CHUNK = 1 << 20  # bytes of a too long line that are read at once


class MetricsFile:
    """Appends lines `{"step": 100, "time": ..., "loss": ...}` to a file.

    `start_step` is the step the run starts from. Lines of later steps, from an interrupted run, are
    dropped, because the run takes those steps again. The other lines keep their bytes.

    Unreadable lines do not stop a run: they are moved to `metrics.jsonl.bad` beside the file, with
    one warning. A line is unreadable if it is not UTF-8, is not a JSON object with an integer
    "step", is incomplete, or is longer than `max_line_bytes` (64 MiB by default). Longer lines are
    copied in chunks and never held in memory.
    """

    def __init__(
        self, path: str | Path, *, start_step: int = 0, max_line_bytes: int = MAX_LINE_BYTES
    ):
        _check_limit(max_line_bytes)
        self.path = local_path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            _rewind(self.path, start_step, max_line_bytes)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Append one line with these values and the time."""
        plain = {name: _as_json(plain_value(name, value)) for name, value in values.items()}
        line = {"step": plain_step(step), "time": round(time.time(), 3)} | plain
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, oldest first.

    Unreadable lines, as `MetricsFile` defines them, are skipped with one warning; an incomplete
    last line is skipped without one.
    """
    _check_limit(max_line_bytes)
    found: list[dict[str, Any]] = []
    bad = _BadLines()
    with open(local_path(path), "rb") as file:
        for line in _lines(file, max_line_bytes):
            fields = _parse(line)
            if fields is not None:
                found.append(fields)
            elif line.is_complete:
                bad.add(line.number)
            _skip_rest(file, line)
    if bad.count:
        warnings.warn(f"{path}: {bad}; skipped", stacklevel=2)
    return found


class _Line(NamedTuple):
    number: int  # from 1
    data: bytes  # with its end; only the first bytes of a line that is too long
    is_complete: bool  # False for a last line without an end
    is_too_long: bool


def _lines(file: IO[bytes], limit: int) -> Iterator[_Line]:
    """Yield every non-blank line; the caller reads or skips the rest of a too long line."""
    number = 0
    while data := file.readline(limit + 1):
        number += 1
        is_too_long = len(data) > limit and not data.endswith(b"\n")
        if is_too_long or data.strip():
            yield _Line(number, data, is_too_long or data.endswith(b"\n"), is_too_long)


def _rest(file: IO[bytes], line: _Line) -> Iterator[bytes]:
    """Yield the rest of a too long line, in chunks."""
    piece = b"" if line.is_too_long else b"\n"
    while not piece.endswith(b"\n") and (piece := file.readline(_CHUNK)):
        yield piece


def _skip_rest(file: IO[bytes], line: _Line) -> None:
    for _ in _rest(file, line):
        pass


def _parse(line: _Line) -> dict[str, Any] | None:
    """Return the fields of a line; None if it is unreadable."""
    if line.is_too_long:
        return None
    try:
        text = line.data.decode("utf-8-sig" if line.number == 1 else "utf-8")
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, too many digits; nested too deeply
        return None
    step = fields.get("step") if isinstance(fields, dict) else None
    is_step = isinstance(step, int) and not isinstance(step, bool) and -(1 << 63) <= step < 1 << 63
    return fields if is_step else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _rewind(path: Path, start_step: int, limit: int) -> None:
    """Drop lines of later steps and move unreadable ones to another file."""
    path = path.resolve()  # a link stays a link
    if not _needs_rewind(path, start_step, limit):
        return
    bad_path = path.with_name(path.name + BAD_SUFFIX)
    bad = _BadLines()
    with (
        replacing(path, path.with_name(f"{path.name}.new")) as temporary,
        _BadFile(bad_path) as bad_file,  # on disk before the replacement: a crash loses no line
        open(path, "rb") as file,
        open(temporary, "wb") as kept,
    ):
        for line in _lines(file, limit):
            fields = _parse(line)
            if fields is None:
                bad.add(line.number)
                bad_file.write(line.data, _rest(file, line))
            elif fields["step"] <= start_step:
                kept.write(line.data if line.is_complete else line.data + b"\n")
    if bad.count:
        warnings.warn(f"{path}: {bad}; moved to {bad_path}", stacklevel=3)


def _needs_rewind(path: Path, start_step: int, limit: int) -> bool:
    """Return True if a line is of a later step, unreadable or incomplete."""
    with open(path, "rb") as file:
        for line in _lines(file, limit):
            fields = _parse(line)
            if fields is None or fields["step"] > start_step or not line.is_complete:
                return True
    return False


class _BadLines:
    """The number of unreadable lines, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0

    def add(self, number: int) -> None:
        self.first = self.first or number
        self.count += 1

    def __str__(self) -> str:
        found = (
            f"line {self.first}"
            if self.count == 1
            else f"{self.count} lines, the first is line {self.first},"
        )
        return f"{found} cannot be read, expected a JSON object with an integer step"


class _BadFile:
    """The file of unreadable lines; it is created with the first of them."""

    def __init__(self, path: Path):
        self._path = path
        self._file: IO[bytes] | None = None

    def write(self, data: bytes, rest: Iterator[bytes]) -> None:
        if self._file is None:
            self._file = open(self._path, "ab")  # noqa: SIM115 - closed by __exit__
        last = data
        self._file.write(data)
        for last in rest:
            self._file.write(last)
        if not last.endswith(b"\n"):
            self._file.write(b"\n")

    def __enter__(self) -> "_BadFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise ValueError(f"max_line_bytes must be >= 1, got {limit}")


def _as_json(value: float | str) -> float | str:
    # JSON has no NaN and infinity; float() reads them from strings.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
