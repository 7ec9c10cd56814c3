"""The status of a child process: its progress by its messages, and how it exited."""

import signal
from dataclasses import dataclass

from ftrain.launching.protocol import (
    HANG,
    HUNG,
    PEER_FAILED,
    Done,
    Failed,
    Message,
    Progress,
    Stopped,
)

_SHELL_SIGNAL = 128  # a shell turns the signal of its child into an exit code above this


@dataclass
class ProcessStatus:
    """What is known of one process. All times are seconds of one monotonic clock."""

    index: int
    alive_at: float  # the last sign of life; the first one is the start of the process
    first_step: int | None = None  # the first step that it reported
    step: int | None = None
    max_step: int = 0
    busy: str | None = None  # its current work according to its newest message, if not a step
    steps: int | None = None
    loss: float | None = None
    failure: Failed | None = None  # the first one that it reported
    stop_signal: str | None = None  # that it reported as the reason to stop
    done: bool = False
    returncode: int | None = None  # negative for a signal
    ended_at: float | None = None  # when it reported a failure, or exited
    terminated: bool = False  # True once the supervisor has aborted or killed it

    def update(self, message: Message, now: float) -> None:
        """Apply a message from the process."""
        match message:
            case Progress():
                self._advance(message, now)
            case Failed():
                self.failure = self.failure or message
                self.ended_at = now if self.ended_at is None else self.ended_at
            case Stopped(name):
                self.stop_signal = name
            case Done(step):
                self.done = True
                self.alive_at = now
                self.step = max(step, self.step or 0)
                self.max_step = max(step, self.max_step)

    def set_exited(self, returncode: int, now: float) -> None:
        """Record how the process exited."""
        self.returncode = returncode
        self.ended_at = now if self.ended_at is None else self.ended_at

    @property
    def running(self) -> bool:
        return self.returncode is None

    @property
    def has_failed(self) -> bool:
        """True if it has exited with an error or by a signal."""
        return self.returncode is not None and self.returncode != 0

    @property
    def has_own_failure(self) -> bool:
        """True if it failed by itself: not by the supervisor, nor because of another process.

        A failure that it reported itself counts even if it was terminated afterwards.
        """
        if not self.has_failed or self.returncode == PEER_FAILED:
            return False
        return not self.terminated if self.failure is None else self.failure.because is None

    @property
    def hung(self) -> bool:
        """True if its own watchdog ended it."""
        return self.returncode == HUNG or (self.failure is not None and self.failure.kind == HANG)

    @property
    def reported_own_failure(self) -> bool:
        """True if it reported an error of its own, which is not a hang."""
        return self.failure is not None and self.failure.because is None and not self.hung

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it."""
        if self.returncode is None:
            return None
        by_signal = self.returncode < 0
        number = -self.returncode if by_signal else self.returncode - _SHELL_SIGNAL
        try:
            return signal.Signals(number).name
        except ValueError:  # of the real-time signals only the first and the last have names
            return f"signal {number}" if by_signal else None

    @property
    def exit_code(self) -> int:
        """The exit code that reports its failure: its own, or 1 for a signal."""
        return self.returncode if self.returncode is not None and self.returncode > 0 else 1

    def _advance(self, progress: Progress, now: float) -> None:
        self.first_step = progress.step if self.first_step is None else self.first_step
        self.busy = progress.busy
        # Backward too: the process recovers from an earlier step, or starts a second run.
        moved = progress.step is not None and progress.step != self.step
        if moved or progress.busy is not None:
            self.alive_at = now
        if moved:
            self.step = progress.step
            self.done = False
        self.max_step = max(self.max_step, self.step or 0)
        self.steps = progress.steps if progress.steps is not None else self.steps
        self.loss = progress.loss if progress.loss is not None else self.loss
