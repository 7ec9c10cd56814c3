"""Starting processes with default signal handling, whatever this test run was started with.

Under `nohup` a test run ignores SIGHUP, and in the background of a script SIGINT. Its children
would inherit that.
"""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def default_signals(numbers: Sequence[signal.Signals] = HANDLED) -> Iterator[None]:
    """While this is entered, no signal of `numbers` is ignored, here or in a child process."""
    before = {number: signal.getsignal(number) for number in numbers}
    ignored = [number for number, handler in before.items() if handler is signal.SIG_IGN]
    try:
        for number in ignored:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def start_process(command: list[Any], **options: Any) -> subprocess.Popen:
    """`subprocess.Popen`; the process handles signals by default."""
    with default_signals():
        return subprocess.Popen(command, **options)
