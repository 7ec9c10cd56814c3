"""Signals: the first Ctrl-C or SIGTERM asks for a clean stop, the second ends the process at once."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SHOW_CURSOR = b"\n\x1b[?25h"  # a progress bar hides it


@contextmanager
def stop_on_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """While this is entered, the first SIGINT or SIGTERM calls `stop` with its name. Main thread only."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if seen:
            # Checkpoints are atomic, so nothing that was saved can be hurt; waiting for threads could take long.
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)
            os._exit(128 + number)
        seen.append(number)
        print(f"{name}: saving and stopping; once more to stop at once", file=sys.stderr, flush=True)
        stop(name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
