"""What one process has told, and how it ended."""

import signal
from dataclasses import dataclass

from ftrain.launching.contract import (
    HANG,
    HUNG,
    PEER_FAILED,
    Done,
    Failed,
    Message,
    Progress,
    Stopped,
)

_SHELL_SIGNAL = 128  # a shell in between turns a signal into an exit code above this


@dataclass
class Account:
    """A process as its messages and its end show it. Moments are in seconds of one clock, whichever."""

    index: int
    sign_at: float  # its last sign of life; the first one is its start
    began: int | None = None  # the first step that it told
    step: int | None = None
    furthest: int = 0  # step
    busy: str | None = None  # what it was at, by its newest message, if not at a step
    steps: int | None = None
    loss: float | None = None
    failed: Failed | None = None
    stopped: str | None = None
    done: bool = False
    code: int | None = None  # of its end; negative for a signal
    ended_at: float | None = None  # when it told why it ends, or ended
    forced: bool = False  # whether it was made to end, for whatever reason

    def hear(self, message: Message, now: float) -> None:
        match message:
            case Progress():
                self._advance(message, now)
            case Failed():
                self.failed = self.failed or message
                self.ended_at = now if self.ended_at is None else self.ended_at
            case Stopped(name):
                self.stopped = name
            case Done(step):
                self.done, self.sign_at = True, now
                self.step = max(step, self.step or 0)
                self.furthest = max(step, self.furthest)

    def end(self, code: int, now: float) -> None:
        self.code = code
        self.ended_at = now if self.ended_at is None else self.ended_at

    @property
    def running(self) -> bool:
        return self.code is None

    @property
    def fell(self) -> bool:
        """Whether it has ended, and not well."""
        return self.code is not None and self.code != 0

    @property
    def fell_by_itself(self) -> bool:
        """Whether the reason for that is its own: it gave one, or was not made to and did not blame another process."""
        if self.failed is not None:
            return self.fell and self.failed.because is None and self.code != PEER_FAILED
        return self.fell and not self.forced and self.code != PEER_FAILED

    @property
    def hung(self) -> bool:
        """Whether its own watchdog found that it did not get on."""
        return self.code == HUNG or (self.failed is not None and self.failed.kind == HANG)

    @property
    def told_own_failure(self) -> bool:
        """Whether it said that it fails, and not because of another process or of a hang."""
        return self.failed is not None and self.failed.because is None and not self.hung

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it."""
        number = (
            -self.code
            if self.code is not None and self.code < 0
            else (self.code or 0) - _SHELL_SIGNAL
        )
        try:
            return signal.Signals(number).name
        except ValueError:  # of real-time signals only the first and the last have names
            return f"signal {number}" if self.code is not None and self.code < 0 else None

    @property
    def exit_code(self) -> int:
        """What to exit with on its behalf."""
        return self.code if self.code is not None and self.code > 0 else 1

    def _advance(self, progress: Progress, now: float) -> None:
        self.began = progress.step if self.began is None else self.began
        self.busy = progress.busy
        moved = (
            progress.step is not None and progress.step != self.step
        )  # also back: it recovers, or begins anew
        if moved or progress.busy is not None:
            self.sign_at = now
        if moved:
            self.step, self.done = progress.step, False
        self.furthest = max(self.furthest, self.step or 0)
        self.steps = progress.steps if progress.steps is not None else self.steps
        self.loss = progress.loss if progress.loss is not None else self.loss
