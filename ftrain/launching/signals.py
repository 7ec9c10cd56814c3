"""Requests to stop: signals go to a mailbox, where the first one asks and the second one insists.

The handlers of the signals do nothing, so no code is interrupted. The supervisor reads the mailbox
between two polls; in a process that trains, a thread reads it (`listen`).
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Mailbox:
    """The signals that have arrived, of `signals`; `select` can wait for it.

    `ignored` are the requested signals that this process was started to ignore.
    """

    def __init__(
        self,
        receiver: socket.socket,
        signals: Sequence[signal.Signals],
        ignored: Sequence[signal.Signals] = (),
    ):
        self.signals = signals
        self.ignored = ignored
        self._receiver = receiver

    def fileno(self) -> int:
        """Return the file descriptor that `select` waits for."""
        return self._receiver.fileno()

    def read(self) -> list[signal.Signals]:
        """Return the signals that have arrived since the last call, without waiting."""
        with suppress(BlockingIOError):
            arrived = self._receiver.recv(4096, socket.MSG_DONTWAIT)
            return [signal.Signals(number) for number in arrived if number in self.signals]
        return []

    def wait(self) -> bool:
        """Block until a signal has arrived; False once the mailbox is closed and empty."""
        return bool(self._receiver.recv(1, socket.MSG_PEEK))


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


@contextmanager
def open_mailbox(signals: Sequence[signal.Signals] = _STOP_SIGNALS) -> Iterator[Mailbox]:
    """While this is entered, `signals` go to a mailbox and do nothing else.

    A signal that is ignored, as by nohup, stays ignored. Outside of the main thread, where Python
    cannot handle signals, the mailbox stays empty.
    """
    receiver, sender = socket.socketpair()
    with receiver, sender:
        mailbox = _make_mailbox(receiver, signals)
        with _deliver(mailbox.signals, sender):
            yield mailbox


@contextmanager
def listen(
    signals: Sequence[signal.Signals],
    on_first: Callable[[signal.Signals], None],
    on_second: Callable[[signal.Signals], None],
) -> Iterator[Mailbox]:
    """Like `open_mailbox`, but a thread reads the mailbox and calls `on_first`, then `on_second`.

    A thread is needed because the main thread may be compiling or waiting for a device.
    """
    receiver, sender = socket.socketpair()
    with receiver:
        mailbox = _make_mailbox(receiver, signals)
        thread = threading.Thread(
            target=_dispatch,
            args=(mailbox, on_first, on_second),
            name="ftrain-signals",
            daemon=True,
        )
        thread.start()
        try:
            with sender, _deliver(mailbox.signals, sender):
                yield mailbox
        finally:
            thread.join()  # it ends because the sender is closed


def _make_mailbox(receiver: socket.socket, signals: Sequence[signal.Signals]) -> Mailbox:
    if threading.current_thread() is not threading.main_thread():
        return Mailbox(receiver, ())
    ignored = [number for number in signals if signal.getsignal(number) is signal.SIG_IGN]
    return Mailbox(receiver, [number for number in signals if number not in ignored], ignored)


@contextmanager
def _deliver(signals: Sequence[signal.Signals], sender: socket.socket) -> Iterator[None]:
    """While this is entered, write the number of each signal that arrives to `sender`."""
    if not signals:
        yield
        return
    sender.setblocking(False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in signals}
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _dispatch(
    mailbox: Mailbox,
    on_first: Callable[[signal.Signals], None],
    on_second: Callable[[signal.Signals], None],
) -> None:
    requests = StopRequests(mailbox)
    has_asked = False
    while mailbox.wait():
        requests.update()
        if requests.first is not None and not has_asked:
            has_asked = True
            on_first(requests.first)
        if requests.second is not None:
            on_second(requests.second)
            return
