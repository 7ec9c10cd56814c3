"""Signals as a mailbox: they are read when there is time for them, and never interrupt anything."""

import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Mailbox:
    """The signals that have come in; something that `select` can wait for."""

    def __init__(self, receiver: socket.socket, signals: Sequence[signal.Signals]):
        self._receiver, self._signals = receiver, signals

    def fileno(self) -> int:
        return self._receiver.fileno()

    def read(self) -> list[signal.Signals]:
        """Those that came in since the last time, without waiting for any."""
        with suppress(BlockingIOError):
            return [
                signal.Signals(number)
                for number in self._receiver.recv(4096)
                if number in self._signals
            ]
        return []


@contextmanager
def open_mailbox(signals: Sequence[signal.Signals] = _STOPPING) -> Iterator[Mailbox]:
    """While this is entered, `signals` do nothing but to go to a mailbox.

    One that is ignored, as by nohup, stays so. Outside of the main thread, where signals cannot be handled, the mailbox
    stays empty.
    """
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        if threading.current_thread() is not threading.main_thread():
            yield Mailbox(receiver, ())
            return
        wanted = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, lambda *_: None) for number in wanted}
        wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield Mailbox(receiver, wanted)
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopRequests:
    """What the signals in a mailbox come to: the first asks for a stop, the second insists on it.

    A hangup only asks, because a terminal that is closed may send it more than once.
    """

    def __init__(self, mailbox: Mailbox):
        self.mailbox = mailbox
        self.asked: signal.Signals | None = None
        self.insisted: signal.Signals | None = None

    def update(self) -> None:
        for number in self.mailbox.read():
            if self.asked is None:
                self.asked = number
            elif self.insisted is None and number != signal.SIGHUP:
                self.insisted = number
