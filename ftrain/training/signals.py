"""Signals: the first Ctrl-C or SIGTERM requests a clean stop, the second ends the process at once.

How signals are received and counted is in `ftrain.launching.signals`.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from ftrain.launching.reporter import reporter_of_this_process
from ftrain.launching.signals import listen

_SHOW_CURSOR = b"\n\x1b[?25h"  # a progress bar hides it


class InterruptShield:
    """Delays the KeyboardInterrupt of Ctrl-C while it is entered.

    A compiled step overwrites the state that it is given. An exception between its call and the
    assignment of its result would lose both states, and Ctrl-C mostly arrives there: while the call
    runs. If SIGINT has any other handler than Python's default, the shield does nothing.
    """

    def __init__(self) -> None:
        self._is_installed = False
        self._is_entered = False
        self._is_pending = False

    def install(self) -> None:
        """Handle SIGINT, if this is the main thread."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True

    def remove(self) -> None:
        """Restore Python's handler."""
        if self._is_installed and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._is_installed = False

    def __enter__(self) -> None:
        self._is_entered = True

    def __exit__(self, *_: object) -> None:
        self._is_entered = False
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_entered:
            signal.default_int_handler(number, frame)
        self._is_pending = True


@contextmanager
def stop_on_signals(
    stop: Callable[[str], None],
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    *,
    saves: bool = True,
) -> Iterator[None]:
    """While this is entered, the first of `signals` calls `stop` with its name.

    The second one ends the process. `saves` is False if the stopped run is not saved, which the
    logged line then says.

    A thread does both, because a Python handler has to wait for the main thread, and that may be
    compiling, or waiting for the device. Outside of the main thread, where signals cannot be
    handled, this does nothing. A signal that this process was started to ignore, such as SIGINT in
    the background of a script, stays ignored, and a line says so.
    """
    action = (
        "saving and stopping"
        if saves
        else "stopping; nothing is saved, as there is no directory to save to"
    )

    def request(number: signal.Signals) -> None:
        stop(number.name)
        _log(f"{number.name}: {action}; send it again to stop at once")

    with listen(signals, request, _end_now) as mailbox:
        if mailbox.ignored:
            _log(_describe_ignored(mailbox.ignored, mailbox.signals))
        yield


def _describe_ignored(ignored: Sequence[signal.Signals], others: Sequence[signal.Signals]) -> str:
    names = " and ".join(number.name for number in ignored)
    way_out = f"; {others[0].name} stops the run" if others else ""
    return f"{names}: ignored, as the process was started that way{way_out}"


def _end_now(number: signal.Signals) -> None:
    # Checkpoints are atomic, so this damages none of them; waiting for threads could take long.
    if sys.stdout.isatty():
        _write(_SHOW_CURSOR)
    os._exit(128 + number)


def _log(line: str) -> None:
    if not reporter_of_this_process().has_supervisor:  # which logs it itself, once for all
        _write(f"{line}\n".encode())


def _write(data: bytes) -> None:
    with suppress(OSError):  # the reader has closed it, which is no reason to lose the run
        os.write(sys.stderr.fileno(), data)
