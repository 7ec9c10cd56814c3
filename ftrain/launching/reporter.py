"""The reporter: how a process tells that it moves on, and ends itself when it does not."""

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

from ftrain.launching.contract import (
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
_EVERY = 0.2  # seconds between two messages
_BUSY = "starting", "compiling"  # what may take its time


class Reporter:
    """Sends the newest step to the supervisor, if there is one, and watches over this process.

    If no step is finished for `hang_timeout` seconds, the stacks of all threads are written to standard error and to
    `log`, and the process ends with the code HUNG. So it does if what `doing` answers, a hook, takes that long; only
    "starting" and "compiling" may take longer.
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
        self._step, self._loss, self._moved = -1, None, time.monotonic()
        self._told = -1
        self._sending, self._closed = threading.Lock(), threading.Event()
        self._started = False
        self.start()
        if lifeline is not None:
            _die_with_parent()
            threading.Thread(
                target=_follow, args=(lifeline,), name="ftrain-lifeline", daemon=True
            ).start()

    @property
    def has_supervisor(self) -> bool:
        return self._progress is not None

    @property
    def is_supervised(self) -> bool:
        """Whether there is somebody to tell, or to watch over."""
        return self._progress is not None or self.hang_timeout is not None

    def start(self) -> None:
        """Begin to tell, and to watch, if there is anyone to tell or anything to watch for."""
        if self.is_supervised and not self._started:
            self._started = True
            faulthandler.enable()  # so that a signal of the supervisor's, SIGABRT, shows where this process hangs
            threading.Thread(target=self._work, name="ftrain-reporter", daemon=True).start()

    def move(self, step: int, loss: float | None = None) -> None:
        """A step is finished."""
        self._step, self._loss, self._moved = step, loss, time.monotonic()

    def say(self, message: Message) -> None:
        """Tell the supervisor something, now."""
        if self._progress is not None:
            with (
                self._sending,
                contextlib.suppress(OSError),
            ):  # it may be gone; the lifeline sees to that
                os.write(self._progress, encode(message))

    def close(self) -> None:
        """Nothing more is to be watched over."""
        self._closed.set()

    def _work(self) -> None:
        armed, before = 0.0, None
        while not self._closed.wait(_EVERY):
            doing = self.doing()
            busy = (
                doing if doing in _BUSY or doing != before else None
            )  # what begins or ends is a sign of life, too
            before = doing
            if busy is not None:
                self._moved = time.monotonic()
            if self._step != self._told or busy is not None:
                self._told = self._step
                self.say(
                    Progress(self._step if self._step >= 0 else None, self.steps, self._loss, busy)
                )
            if self.hang_timeout is None:
                continue
            still = time.monotonic() - self._moved
            if still > (
                self.hang_timeout if self._progress is None else 1.2 * self.hang_timeout + 2
            ):  # it knows more
                self._end(still)
            if (
                time.monotonic() - armed > self.hang_timeout / 4
            ):  # for a hang that does not even let this thread run
                armed = time.monotonic()
                faulthandler.dump_traceback_later(self.hang_timeout * 1.5 + 5, exit=True, file=2)
        faulthandler.cancel_dump_traceback_later()

    def _end(self, still: float) -> None:
        why = f"no step was finished for {still:.0f} s after step {max(self._step, 0)}"
        self.say(Failed(HANG, why))
        for file in (sys.__stderr__, self._open_log()):
            if file is not None:
                with contextlib.suppress(OSError, ValueError):
                    file.write(f"ftrain: {why}; the process ends here:\n")
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
    """The one that the environment asks for; it starts when this is called for the first time."""
    given = (
        os.environ.pop(name, None) for name in (PROGRESS, LIFELINE)
    )  # a child has not got these files
    progress, lifeline = (None if number is None else int(number) for number in given)
    return Reporter(progress, lifeline, float(os.environ.get(HANG_TIMEOUT, 0)) or None)


def _die_with_parent() -> None:
    """Have the system end this process with the one that started it, also while it is stopped and cannot notice."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _follow(lifeline: int) -> None:
    """End this process when whoever started it is gone."""
    with contextlib.suppress(OSError):
        while os.read(lifeline, 1):
            pass
    with contextlib.suppress(Exception):
        print("ftrain: the process that started this one is gone", file=sys.stderr, flush=True)
    os._exit(1)
