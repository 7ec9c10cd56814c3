"""Signals: the first Ctrl-C or SIGTERM asks for a clean stop, the second ends the process at once."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from ftrain.launching.reporter import reporter_of_this_process

_SHOW_CURSOR = b"\n\x1b[?25h"  # a progress bar hides it


class InterruptShield:
    """Delays the KeyboardInterrupt of Ctrl-C while it is entered.

    A compiled step writes over the state that it is given. An exception between its call and the
    assignment of what it returns would lose both states, and Ctrl-C mostly arrives there: while the
    call runs. Signals that are handled in any other way than by Python's default are left alone.
    """

    def __init__(self) -> None:
        self._is_installed = self._is_entered = self._is_pending = False

    def install(self) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True

    def remove(self) -> None:
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
    """While this is entered, the first of `signals` calls `stop` with its name, and the second ends the process.

    `saves` says whether what is stopped is saved, for the line that is printed then.

    A thread does both, because a Python handler has to wait for the main thread, and that may be
    compiling, or waiting for the device. Outside of the main thread, where signals cannot be
    handled, this does nothing. A signal that this process was started to ignore, as SIGINT in the
    background of a script, stays ignored, and a line says so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = [number for number in signals if signal.getsignal(number) is signal.SIG_IGN]
    signals = [number for number in signals if number not in ignored]
    if ignored and not reporter_of_this_process().has_supervisor:
        _say(f"{_describe_ignored(ignored, signals)}\n".encode())
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    what = (
        "saving and stopping"
        if saves
        else "stopping; nothing is saved, as there is no directory to save to"
    )
    listener = threading.Thread(
        target=_listen, args=(receiver, stop, signals, what), name="ftrain-signals", daemon=True
    )
    listener.start()
    handlers = {number: signal.signal(number, lambda *_: None) for number in signals}
    wakeup = signal.set_wakeup_fd(sender.fileno())
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        sender.close()
        listener.join()
        receiver.close()


def _listen(
    receiver: socket.socket,
    stop: Callable[[str], None],
    signals: Sequence[signal.Signals],
    what: str,
) -> None:
    seen = False
    while numbers := receiver.recv(64):
        for number in numbers:
            if number not in signals:
                continue
            if seen:
                _end_now(number)
            seen = True
            name = signal.Signals(number).name
            stop(name)
            if not reporter_of_this_process().has_supervisor:  # which says so itself, once for all
                _say(f"{name}: {what}; once more to stop at once\n".encode())


def _describe_ignored(ignored: Sequence[signal.Signals], others: Sequence[signal.Signals]) -> str:
    names = " and ".join(number.name for number in ignored)
    way_out = f"; {others[0].name} stops the run" if others else ""
    return f"{names}: ignored, as the process was started that way{way_out}"


def _end_now(number: int) -> None:
    # Checkpoints are atomic, so nothing that was saved can be hurt; waiting for threads could take
    # long.
    if sys.stdout.isatty():
        _say(_SHOW_CURSOR)
    os._exit(128 + number)


def _say(line: bytes) -> None:
    with suppress(OSError):  # whoever read it is gone: not a reason to lose the run
        os.write(sys.stderr.fileno(), line)
