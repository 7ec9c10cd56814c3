"""What the processes of a group print: whole lines, each with the number of its process in front."""

import os
import re
import selectors
import threading
import time
from collections.abc import Sequence

from ftrain.launching.lines import LineCutter
from ftrain.launching.screen import Screen

LINE_LIMIT = 65536  # bytes; what is longer is shown as several lines
_CHUNK = 65536
_POLL = 0.1  # seconds
_LAST_WORDS = 5.0  # seconds that something which nobody could end may go on to print
_OWN = b"ftrain: "  # how an error of ours begins
_MOST_SAID = 1000  # lines to compare with
_NOISE = re.compile(
    rb"\s*\[Gloo\] Rank "  # tells of every connection, whatever the level of its log
    # how the runtime puts it that another process is gone, which the launcher says itself, and of which one
    rb"|E\d+ .*\] Polled an error from coordination service"
    rb"|F\d+ .*\] Terminating process because the JAX distributed service detected fatal errors"
    rb"|Additional GRPC error information from remote target coordination_service"
    rb"|:UNKNOWN:Error received from peer"
    rb"|[EW]\d+ .* preemption_sync_manager\.cc:\d+\] Failed to "
)


class OutputReader:
    """A thread that passes on what processes print, so that they need not wait for anything else."""

    def __init__(self, outputs: Sequence[tuple[int, int]], screen: Screen):
        self._screen = screen
        self._selector = selectors.DefaultSelector()
        self._closing_at: float | None = None
        self._said: dict[bytes, _Stream] = {}  # lines of errors, by who said them first
        for index, descriptors in enumerate(outputs):
            prefix = b"[%d] " % index if index else b""
            for stream, descriptor in enumerate(descriptors):
                self._selector.register(
                    descriptor, selectors.EVENT_READ, _Stream(prefix, error=stream == 1)
                )
        self._thread = threading.Thread(target=self._read_all, name="ftrain-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pass on the rest. The processes must have ended; the file descriptors are left for others to close."""
        self._closing_at = time.monotonic()
        self._thread.join()
        self._selector.close()

    def _read_all(self) -> None:
        while self._selector.get_map():
            closing_at = (
                self._closing_at
            )  # asked before looking, so that nothing can come in between
            ready = self._selector.select(_POLL)
            for key, _ in ready:
                self._read(key)
            if closing_at is not None and (
                not ready or time.monotonic() > closing_at + _LAST_WORDS
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
        """Whether it belongs to a mistake that another process has told already, in the same words."""
        said_by = (
            self._said.setdefault(line, stream)
            if stream.error and len(self._said) < _MOST_SAID
            else None
        )
        by_other = said_by not in (None, stream)
        stream.repeats = by_other and (stream.repeats or line.startswith(_OWN))
        return stream.repeats


class _Stream:
    def __init__(self, prefix: bytes, *, error: bool):
        self.prefix, self.error = prefix, error
        self.repeats = False  # what another one has said
        self.lines = LineCutter(LINE_LIMIT)
