"""The reporter: sends the progress of this process to the supervisor, and ends it when it hangs."""

import contextlib
import ctypes
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ftrain.launching.protocol import (
    HANG,
    HANG_TIMEOUT,
    HUNG,
    LIFELINE,
    PROGRESS,
    Failed,
    Message,
    Progress,
    encode,
)

_PR_SET_PDEATHSIG = 1  # of Linux
_INTERVAL = 0.2  # seconds between two messages
_UNLIMITED = ("starting", "compiling")  # work that may take longer than the hang timeout


class Reporter:
    """Sends the progress of this process to the supervisor, if there is one, and detects hangs.

    If no step finishes for `hang_timeout` seconds, it writes the stacks of all threads to standard
    error and to `log`, and ends the process with the exit code HUNG. The same holds for other work,
    as named by `doing`, such as a hook; only "starting" and "compiling" may take longer.
    """

    def __init__(
        self,
        progress: int | None = None,
        lifeline: int | None = None,
        hang_timeout: float | None = None,
    ):
        self.hang_timeout = hang_timeout
        self.doing: Callable[[], str | None] = lambda: "starting"
        self.steps: int | None = None
        self.log: Path | None = None
        self._progress = progress
        self._step = -1
        self._loss: float | None = None
        self._moved_at = time.monotonic()
        self._sent_step = -1
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._started = False
        self.start()
        if lifeline is not None:
            _die_with_parent()
            threading.Thread(
                target=_watch_lifeline, args=(lifeline,), name="ftrain-lifeline", daemon=True
            ).start()

    @property
    def has_supervisor(self) -> bool:
        """True if a supervisor has started this process."""
        return self._progress is not None

    @property
    def is_supervised(self) -> bool:
        """True if there is a supervisor or a hang timeout."""
        return self._progress is not None or self.hang_timeout is not None

    def start(self) -> None:
        """Start the thread that reports and watches, if this process is supervised."""
        if self.is_supervised and not self._started:
            self._started = True
            faulthandler.enable()  # SIGABRT from the supervisor shows where this process hangs
            threading.Thread(target=self._run, name="ftrain-reporter", daemon=True).start()

    def set_step(self, step: int, loss: float | None = None) -> None:
        """Record that a step has finished."""
        self._step = step
        self._loss = loss
        self._moved_at = time.monotonic()

    def send(self, message: Message) -> None:
        """Send a message to the supervisor, if there is one."""
        if self._progress is None:
            return
        # The supervisor may have died: then the lifeline ends this process.
        with self._sending, contextlib.suppress(OSError):
            os.write(self._progress, encode(message))

    def close(self) -> None:
        """Stop reporting and watching."""
        self._closed.set()

    def _run(self) -> None:
        armed_at = 0.0
        previous = None
        while not self._closed.wait(_INTERVAL):
            doing = self.doing()
            # The beginning and the end of any work are signs of life, too.
            busy = doing if doing in _UNLIMITED or doing != previous else None
            previous = doing
            if busy is not None:
                self._moved_at = time.monotonic()
            if self._step != self._sent_step or busy is not None:
                self._sent_step = self._step
                step = self._step if self._step >= 0 else None
                self.send(Progress(step, self.steps, self._loss, busy))
            if self.hang_timeout is None:
                continue
            silence = time.monotonic() - self._moved_at
            if silence > self._limit(self.hang_timeout):
                self._end(silence)
            if time.monotonic() - armed_at > self.hang_timeout / 4:
                # For a hang that blocks even this thread.
                armed_at = time.monotonic()
                faulthandler.dump_traceback_later(self.hang_timeout * 1.5 + 5, exit=True, file=2)
        faulthandler.cancel_dump_traceback_later()

    def _limit(self, hang_timeout: float) -> float:
        """Return the seconds of silence that end this process.

        A supervisor sees all processes and acts first, as it knows which one hangs.
        """
        return hang_timeout if self._progress is None else 1.2 * hang_timeout + 2

    def _end(self, silence: float) -> None:
        reason = f"no step was finished for {silence:.0f} s after step {max(self._step, 0)}"
        self.send(Failed(HANG, reason))
        for file in (sys.__stderr__, self._open_log()):
            if file is not None:
                with contextlib.suppress(OSError, ValueError):
                    file.write(f"ftrain: {reason}; the process ends here:\n")
                    file.flush()
                    faulthandler.dump_traceback(file)
        os._exit(HUNG)

    def _open_log(self) -> IO[str] | None:
        with contextlib.suppress(OSError):
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                return open(self.log, "a")
        return None


@functools.cache
def reporter_of_this_process() -> Reporter:
    """Return the reporter that the environment describes; the first call starts it.

    There is one for each process, because the file descriptors of the supervisor belong to it. The
    variables are removed from the environment: a child process does not have these descriptors.
    """
    given = (os.environ.pop(name, None) for name in (PROGRESS, LIFELINE))
    progress, lifeline = (None if number is None else int(number) for number in given)
    return Reporter(progress, lifeline, float(os.environ.get(HANG_TIMEOUT, 0)) or None)


def _die_with_parent() -> None:
    """Have the system kill this process when its parent dies, even while it is stopped."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_lifeline(lifeline: int) -> None:
    """End this process when the supervisor dies."""
    with contextlib.suppress(OSError):
        while os.read(lifeline, 1):
            pass
    with contextlib.suppress(Exception):
        print(
            "ftrain: the supervisor has ended, so this process ends too",
            file=sys.stderr,
            flush=True,
        )
    os._exit(1)
