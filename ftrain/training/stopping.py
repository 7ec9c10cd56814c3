"""Stopping a run: requests, Ctrl-C and other signals, and the last step of several processes."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from ftrain.cluster import ProcessMismatchError
from ftrain.coordination import Coordinator
from ftrain.launching.reporter import reporter_of_this_process
from ftrain.launching.signals import listen
from ftrain.training.consensus import Consensus

DATA_ENDED = "the data ended"  # a reason to stop


class Stopping:
    """Requests to stop, from any thread; the first reason is kept.

    With several processes a request is a proposal: all of them agree on the last step.
    """

    def __init__(self, coordinator: Coordinator, consensus: Consensus | None):
        self.reason: str | None = None
        self.interrupted = False
        self.thread: int | None = None  # the thread that takes the steps
        self._is_final = False  # that thread saw the request: no further step may be taken
        self._coordinator = coordinator
        self._consensus = consensus

    def ask(self, reason: str, *, interrupted: bool = False) -> None:
        """Request a stop; with `interrupted`, as soon as possible."""
        if self._consensus is not None:
            return self._consensus.ask_to_stop(reason, interrupted=interrupted)
        self.interrupted = self.interrupted or interrupted
        self.reason = self.reason or reason
        if threading.get_ident() == self.thread:  # another thread may ask just before a step
            self._is_final = True
        return None

    def finish_if_due(self, step: int) -> bool:
        """Return whether `step` was the last one; if so, no further step may be taken."""
        if self._coordinator.should_stop():
            self.ask("requested by a thread")
        self.hear(step)
        self._is_final = self.reason is not None
        return self._is_final

    def hear(self, step: int) -> None:
        """Take over the decision of the processes, if `step` is the last one."""
        if self._consensus is not None and self._consensus.is_over(step, wait=True):
            self.interrupted = self._consensus.interrupted
            self.reason = self._consensus.reason

    def is_coming(self, step: int) -> bool:
        """Return whether data after `step` are no longer needed; for the read-ahead thread."""
        is_over = self._consensus is not None and self._consensus.is_over(step)
        return self.interrupted or is_over or self._coordinator.should_stop()

    def check(self) -> None:
        """Raise an error if no further step may be taken."""
        if self._is_final:
            self._coordinator.raise_requested_exception()
            raise RuntimeError(f"the run has been stopped: {self.reason}")

    def revoke(self) -> None:
        """Withdraw a request: the run goes back, and the hook will ask again at the same step."""
        if self._is_final:
            self.reason = None
            self._is_final = False

    def end_data(self, step: int) -> None:
        """Stop because there are no data after `step`."""
        self.ask(DATA_ENDED)
        if self._consensus is not None and not self._consensus.is_over(step, wait=True):
            raise ProcessMismatchError(
                f"the data of process {self._consensus.group.index} end after step {step}, "
                "but others have started a later one; all need the same number of batches"
            )

    def catch_up(self, step: Callable[[], int], take: Callable[[], None]) -> None:
        """The loop was left: take the steps that the other processes have already begun."""
        if self._consensus is not None:
            self.ask("the loop was left")
            while not self._consensus.is_over(step(), wait=True):
                take()
            self.hear(step())


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

    The second one ends the process. `saves` is False if the stopped run is not saved; the
    logged line then states that.

    A thread does both, because a Python handler has to wait for the main thread, and that may be
    compiling, or waiting for the device. Outside of the main thread, where signals cannot be
    handled, this does nothing. A signal that this process was started to ignore, such as SIGINT in
    the background of a script, stays ignored, with a line in the log.
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
