"""Where all lines go, one after the other, with a line below them that tells how far the job is."""

import os
import queue
import select
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

_ROOM = 256  # pieces of output that may wait to be written
_PATIENCE = 5.0  # seconds that a process waits for room; then its lines are dropped, because training matters more
_REDRAW = 0.1  # seconds
_ERASE = b"\r\x1b[2K"


class Screen:
    """Writes to two file descriptors from a thread of its own: a terminal that is held stops nothing but that thread.

    With a console there is a line for the status. Rich renders it, but does not print the rest, because lines of
    processes are passed on as they are, byte for byte.
    """

    def __init__(
        self, out: int, err: int, console: "Console | None" = None, *, patience: float = _PATIENCE
    ):
        self._out, self._err, self._console, self._patience = out, err, console, patience
        self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_ROOM)
        self._lock = threading.Lock()
        self._dropped = 0  # lines
        self._status, self._drawn = "", ""
        self._thread = threading.Thread(target=self._write_all, name="ftrain-screen", daemon=True)
        self._thread.start()

    def show(self, lines: bytes, *, error: bool = False) -> None:
        """Lines of a process, each with its newline. If nobody reads them, they are only counted."""
        if self._room.acquire(timeout=0 if self._dropped else self._patience):
            self._queue.put(_Piece(lines, error, self._room))
            return
        with self._lock:
            self._dropped += lines.count(b"\n")

    def say(self, text: str) -> None:
        """A line of the supervisor's own; there are few, so none is dropped."""
        self._queue.put(_own(text))

    def set_status(self, text: str) -> None:
        """What stands below the lines, if there is a console."""
        self._status = text

    def close(self) -> None:
        """Write what is left; if nobody reads it, not forever."""
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
        if piece.room is not None:
            piece.room.release()
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            self._write(
                _own(
                    f"{dropped:,} lines of the processes are missing here, because nobody read them"
                )
            )

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
    room: threading.Semaphore | None = None  # what it takes up, if that is limited


def _own(text: str) -> _Piece:
    return _Piece(f"launch: {text}\n".encode(errors="replace"))


def _write_whole(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # some terminals are set not to wait
            select.select([], [descriptor], [])
        except OSError:  # whoever read it is gone: not a reason to lose the run
            return
