"""Signals as a mailbox: they are read when there is time for them, and interrupt nothing."""

import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Mailbox:
    """The signals that have arrived; `select` can wait for it."""

    def __init__(self, receiver: socket.socket, signals: Sequence[signal.Signals]):
        self._receiver = receiver
        self._signals = signals

    def fileno(self) -> int:
        """Return the file descriptor that `select` waits for."""
        return self._receiver.fileno()

    def read(self) -> list[signal.Signals]:
        """Return the signals that have arrived since the last call, without waiting."""
        with suppress(BlockingIOError):
            return [
                signal.Signals(number)
                for number in self._receiver.recv(4096)
                if number in self._signals
            ]
        return []


@contextmanager
def open_mailbox(signals: Sequence[signal.Signals] = _STOP_SIGNALS) -> Iterator[Mailbox]:
    """While this is entered, `signals` go to a mailbox and do nothing else.

    A signal that is ignored, as by nohup, stays ignored. Outside of the main thread, where Python
    cannot handle signals, the mailbox stays empty.
    """
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        if threading.current_thread() is not threading.main_thread():
            yield Mailbox(receiver, ())
            return
        handled = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, lambda *_: None) for number in handled}
        wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield Mailbox(receiver, handled)
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopRequests:
    """The signals of a mailbox as requests: the first is to save and stop, the second to stop now.

    A hangup counts only as a first one, because a closed terminal may send it more than once.
    """

    def __init__(self, mailbox: Mailbox):
        self.mailbox = mailbox
        self.first: signal.Signals | None = None
        self.second: signal.Signals | None = None

    def update(self) -> None:
        """Read the mailbox."""
        for number in self.mailbox.read():
            if self.first is None:
                self.first = number
            elif self.second is None and number != signal.SIGHUP:
                self.second = number
