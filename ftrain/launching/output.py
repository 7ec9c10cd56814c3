"""The output of the processes: whole lines with the process index, above one line of status."""

import os
import queue
import re
import select
import selectors
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

MAX_OUTPUT_LINE = 65536  # bytes; a longer line is shown as several
_CHUNK = 65536
_POLL = 0.1  # seconds
_DRAIN_SECONDS = (
    5.0  # for output that arrives after `close`, from a process that could not be killed
)
_OWN_ERROR = b"ftrain: "  # the beginning of ftrain's own error messages
_MAX_COMPARED = 1000  # error lines that are kept to find repetitions
_NOISE = re.compile(
    rb"\s*\[Gloo\] Rank "  # one for each connection, at every log level
    # The runtime's messages about a lost process. The launcher reports it in one line.
    rb"|E\d+ .*\] Polled an error from coordination service"
    rb"|F\d+ .*\] Terminating process because the JAX distributed service detected fatal errors"
    rb"|Additional GRPC error information from remote target coordination_service"
    rb"|:UNKNOWN:Error received from peer"
    rb"|[EW]\d+ .* preemption_sync_manager\.cc:\d+\] Failed to "
)
_MAX_PENDING = 256  # pieces of output that may wait to be written
_PATIENCE = 5.0  # seconds that output waits for space; then it is dropped: training matters more
_REDRAW = 0.1  # seconds
_ERASE = b"\r\x1b[2K"


class LineSplitter:
    """Splits a stream into lines; a line longer than `limit` bytes comes in parts of that size."""

    def __init__(self, limit: int):
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without their newlines."""
        self._rest += data
        if b"\n" not in data and len(self._rest) <= self._limit:
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        whole = max(0, len(rest) - 1) // self._limit * self._limit  # bytes that need not wait
        self._rest = bytearray(rest[whole:])
        overlong = self._parts(rest[:whole]) if whole else []
        return [part for line in lines for part in self._parts(line)] + overlong

    def end(self) -> list[bytes]:
        """Return the last line, if it had no newline."""
        rest = bytes(self._rest)
        self._rest = bytearray()
        return [rest] if rest else []

    def _parts(self, line: bytes) -> list[bytes]:
        return [line[at : at + self._limit] for at in range(0, len(line), self._limit)] or [b""]


class OutputReader:
    """A thread that reads the output of all processes, so that no process waits for another."""

    def __init__(self, outputs: Sequence[tuple[int, int]], screen: "Screen"):
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._closing_at: float | None = None
        self._first_writer: dict[bytes, _Stream] = {}  # of each error line
        for index, descriptors in enumerate(outputs):
            prefix = b"[%d] " % index if index else b""
            for stream, descriptor in enumerate(descriptors):
                self._selector.register(
                    descriptor, selectors.EVENT_READ, _Stream(prefix, error=stream == 1)
                )
        self._thread = threading.Thread(target=self._read_all, name="ftrain-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show the rest. The processes must have exited; the caller closes the descriptors."""
        self._closing_at = time.monotonic()
        self._thread.join()
        self._selector.close()

    def _read_all(self) -> None:
        while self._selector.get_map():
            closing_at = self._closing_at  # read before select, or output in between is missed
            ready = self._selector.select(_POLL)
            for key, _ in ready:
                self._read(key)
            if closing_at is not None and (
                not ready or time.monotonic() > closing_at + _DRAIN_SECONDS
            ):
                break
        for key in list(self._selector.get_map().values()):
            self._show(key.data, key.data.lines.end())

    def _read(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, _CHUNK)
        if data:
            self._show(key.data, key.data.lines.feed(data))
        else:
            self._selector.unregister(key.fd)
            self._show(key.data, key.data.lines.end())

    def _show(self, stream: "_Stream", lines: list[bytes]) -> None:
        new = [
            line for line in lines if not _NOISE.match(line) and not self._is_repeated(stream, line)
        ]
        shown = b"".join(stream.prefix + line + b"\n" for line in new)
        if shown:
            self._screen.show(shown, error=stream.error)

    def _is_repeated(self, stream: "_Stream", line: bytes) -> bool:
        """True if it belongs to an error of ftrain that another process has printed before."""
        writer = None
        if stream.error and len(self._first_writer) < _MAX_COMPARED:
            writer = self._first_writer.setdefault(line, stream)
        by_other = writer not in (None, stream)
        stream.repeats = by_other and (stream.repeats or line.startswith(_OWN_ERROR))
        return stream.repeats


class _Stream:
    """The stdout or stderr of one process."""

    def __init__(self, prefix: bytes, *, error: bool):
        self.prefix = prefix
        self.error = error
        self.repeats = False  # an error that another process has printed before
        self.lines = LineSplitter(MAX_OUTPUT_LINE)


class Screen:
    """Writes to two file descriptors in a thread: a blocked terminal blocks only that thread.

    With a console, a line of status stands below the output. Rich renders only that line, because
    the output of the processes is passed on byte for byte.
    """

    def __init__(
        self, out: int, err: int, console: "Console | None" = None, *, patience: float = _PATIENCE
    ):
        self._out = out
        self._err = err
        self._console = console
        self._patience = patience
        self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._space = threading.Semaphore(_MAX_PENDING)
        self._lock = threading.Lock()
        self._dropped = 0  # lines
        self._status = ""
        self._drawn = ""  # the status on the terminal
        self._thread = threading.Thread(target=self._write_all, name="ftrain-screen", daemon=True)
        self._thread.start()

    def show(self, lines: bytes, *, error: bool = False) -> None:
        """Write lines of a process, with their newlines; if they are not read, only count them."""
        if self._space.acquire(timeout=0 if self._dropped else self._patience):
            self._queue.put(_Piece(lines, error, self._space))
            return
        with self._lock:
            self._dropped += lines.count(b"\n")

    def log(self, text: str) -> None:
        """Write a line of the supervisor's own; there are few, so none is dropped."""
        self._queue.put(_own_line(text))

    def set_status(self, text: str) -> None:
        """Set the line below the output, which needs a console."""
        self._status = text

    def close(self) -> None:
        """Write what is left, with a time limit in case it is not read."""
        self._status = ""
        self._queue.put(None)
        self._thread.join(self._patience)

    def _write_all(self) -> None:
        while True:
            try:
                piece = self._queue.get(timeout=_REDRAW if self._console else None)
            except queue.Empty:
                self._draw()
                continue
            if piece is None:
                self._draw()
                return
            self._write(piece)
            if self._queue.empty():
                self._draw()

    def _write(self, piece: "_Piece") -> None:
        if self._drawn:
            self._drawn = ""
            _write_whole(self._out, _ERASE)
        _write_whole(self._err if piece.error else self._out, piece.lines)
        if piece.space is not None:
            piece.space.release()
        with self._lock:
            dropped = self._dropped
            self._dropped = 0
        if dropped:
            text = (
                f"{dropped:,} lines of output were dropped here, because they were not read in time"
            )
            self._write(_own_line(text))

    def _draw(self) -> None:
        if self._console is None or self._status == self._drawn:
            return
        self._drawn = self._status
        with self._console.capture() as capture:
            self._console.print(
                self._drawn, end="", no_wrap=True, overflow="ellipsis", markup=False, highlight=True
            )
        _write_whole(self._out, _ERASE + capture.get().encode())


class _Piece(NamedTuple):
    lines: bytes
    error: bool = False
    space: threading.Semaphore | None = None  # to release once it is written


def _own_line(text: str) -> _Piece:
    return _Piece(f"launch: {text}\n".encode(errors="replace"))


def _write_whole(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # some terminals are non-blocking
            select.select([], [descriptor], [])
        except OSError:  # the reader has closed it, which is no reason to lose the run
            return
