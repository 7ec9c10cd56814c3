"""The hook that saves and restores checkpoints."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ftrain.checkpoints import CheckpointManager, hold
from ftrain.training import Hook, Report, TrainState, Trigger, every


class SaveListener:
    """Is told of every checkpoint. Override what you need."""

    def begin(self) -> None:
        """Once, before the first step."""

    def before_save(self, step: int) -> None:
        """A checkpoint is about to be taken."""

    def after_save(self, step: int) -> bool | None:
        """A checkpoint has been written; True asks the run to stop."""

    def end(self, step: int) -> None:
        """Once, after the last checkpoint, unless an exception ended the run."""


class CheckpointSaver(Hook):
    """Start from the newest checkpoint in `directory`, save there when it is time, and once more at the end.

    The reference also saves what it starts with; here that needs `at_start`, and a step that is saved already is not
    saved again. A state whose loss or gradient is not finite is not saved at the end. `listeners` are told of every
    checkpoint when it is written, so with them training waits for it. One saver at a time works in a directory.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        when: Trigger = every(secs=600),
        keep: int = 3,
        at_start: bool = False,
        listeners: Sequence[SaveListener] = (),
    ):
        for listener in listeners:
            if not isinstance(listener, SaveListener):
                raise TypeError(f"listeners must be instances of ftrain.hooks.SaveListener, got {listener!r}")
        self.when, self.at_start, self.listeners = when, at_start, listeners
        self.manager = CheckpointManager(directory, keep=keep)
        self._lock: IO[str] | None = None
        self._begun = False

    def start(self, state: TrainState) -> TrainState:
        if self._lock is None:
            self._lock = hold(self.manager.directory / "saver.lock", f"{self.manager.directory} is saved to")
        self.manager.__enter__()  # close() leaves it
        self.manager.wait()
        if not self._begun:
            for listener in self.listeners:
                listener.begin()
        self._begun = True
        return state if self.manager.latest() is None else self.manager.restore(like=state)

    def begin(self, report: Report) -> None:
        if self.at_start:
            self._save(report)

    def after_step(self, report: Report) -> None:
        self._save(report)

    def end(self, report: Report) -> None:
        self.manager.wait()
        if report.step > (self.manager.latest() or 0) and _is_finite(report):
            self._save(report)
        self.manager.wait()
        for listener in self.listeners:
            listener.end(report.step)

    def close(self) -> None:
        try:
            self.manager.close()
        finally:
            self._begun = False
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _save(self, report: Report) -> None:
        self.manager.wait()
        if report.step in self.manager.steps():
            return
        for listener in self.listeners:
            listener.before_save(report.step)
        report.flush()  # what was measured before a checkpoint must not be lost with what comes after it
        self.manager.save(report.step, report.state)
        if self.listeners:
            self.manager.wait()
        for listener in self.listeners:
            if listener.after_save(report.step):
                report.stop(f"{type(listener).__name__} asked to after the checkpoint of step {report.step}")


def _is_finite(report: Report) -> bool:
    values = report.values()
    shown = [values.get(name, 0.0) for name in ("loss", "gradient_norm")]
    return bool(values.get("update_skipped")) or all(isinstance(each, str) or math.isfinite(each) for each in shown)
