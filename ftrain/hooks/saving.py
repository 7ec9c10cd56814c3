"""The hook that saves and restores checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import jax

from ftrain.checkpoints import CheckpointManager, InUseError, SaveError, hold
from ftrain.checkpoints.lock import is_still_held
from ftrain.training import Report, TrainState, Trigger, every
from ftrain.training.hook import StateSaver

HOOKS = "hooks"  # the extra value of a checkpoint that has the states of hooks
LOCK = "saver.lock"  # in the directory of checkpoints, held by who saves there


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


class CheckpointSaver(StateSaver):
    """Start from the newest checkpoint in `directory`, save there when it is time, and once more at the end.

    The reference also saves what it starts with; here that needs `at_start`, and a step that is saved already is not
    saved again. Which checkpoints stay, and what is put aside as suspect, is told by `CheckpointManager`; its metrics
    are those of the step, and what was published at it: `best_metric` may be `eval/accuracy`, with `best_mode="max"`,
    if both are due at the same steps. What is published at the end of the run is added to the last checkpoint. With the
    state it saves what the hooks of the run remember. `listeners` are told of every checkpoint when it is written, so
    with them training waits for it.

    If a checkpoint cannot be written, because the disk is full, say, the run ends, unless `on_error` is "continue".
    One saver at a time works in a directory, and holds a lock there. In a process that only waits for another's
    checkpoints, `Scaffold(wait_secs=...)`, it restores and saves nothing, and needs no lock.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        when: Trigger = every(secs=600),
        keep: int | Literal["all"] = 3,
        keep_every_steps: int | None = None,
        keep_every_hours: float | None = None,
        keep_best: int = 0,
        best_metric: str = "loss",
        best_mode: Literal["min", "max"] | None = None,
        allow_nonfinite: Sequence[str] = (),
        on_error: Literal["stop", "continue"] = "stop",
        at_start: bool = False,
        listeners: Sequence[SaveListener] = (),
    ):
        for listener in listeners:
            if not isinstance(listener, SaveListener):
                raise TypeError(
                    f"listeners must be instances of ftrain.hooks.SaveListener, got {listener!r}"
                )
        if on_error not in ("stop", "continue"):
            raise ValueError(f"on_error must be 'stop' or 'continue', got {on_error!r}")
        self.when, self.at_start, self.listeners, self.on_error = (
            when,
            at_start,
            listeners,
            on_error,
        )
        self.manager = CheckpointManager(
            directory,
            keep=keep,
            keep_every_steps=keep_every_steps,
            keep_every_hours=keep_every_hours,
            keep_best=keep_best,
            best_metric=best_metric,
            best_mode=best_mode,
            allow_nonfinite=allow_nonfinite,
        )
        self._lock: IO[str] | None = None
        self._lock_path = Path()
        self._begun = False
        self._unfinished: list[int] = []
        self._looked_for_best = False
        self._hook_states: dict[str, Any] | None = None  # of the checkpoint that was restored

    def restore_state(self, like: TrainState) -> TrainState | None:
        if not self._begun:
            self._begun = True
            for listener in self.listeners:
                listener.begin()
        if self._lock is None and jax.process_index() == 0 and not self.read_only:
            directory = self.manager.directory
            self._lock_path = directory / LOCK
            self._lock = hold(self._lock_path, f"{directory} is saved to")
        self.manager.__enter__()  # close() leaves it
        self.manager.wait()
        self._unfinished = self.manager.unfinished()
        self._hook_states = None
        if self.manager.is_empty():
            return None
        state: TrainState = self.manager.restore(like=like)
        assert self.manager.restored is not None
        self._hook_states = self.manager.extra(self.manager.restored).get(HOOKS, {})
        return state

    def saved_hook_states(self) -> Mapping[str, Mapping[str, Any]] | None:
        return self._hook_states

    def begin(self, report: Report) -> None:
        self.manager.on_warning = report.notice
        if self.read_only:
            report.notice(
                f"{self.manager.directory} is written by another process; this one saves nothing"
            )
            return
        for step in self._unfinished:
            report.notice(
                f"the save of step {step} was never finished; the run goes on from step {report.step}"
            )
        if suspects := [step for step in self.manager.suspects() if step > report.step]:
            report.notice(
                f"the state of step {suspects[0]} was not finite, and was put aside as {suspects[0]}.suspect; "
                f"the run goes on from step {report.step}"
            )
        if self.at_start:
            self._save(report)

    def after_step(self, report: Report) -> None:
        self._save(report)

    def end(self, report: Report) -> None:
        if report.step > 0:
            self._save(report)
        with self._surviving(report):
            self.manager.wait()
        self._complete(report)
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
        if self.read_only:
            return
        if self._lock is not None and not is_still_held(self._lock, self._lock_path):
            raise InUseError(
                f"{self._lock_path} was deleted, and another process saves there now; this run ends"
            )
        with self._surviving(report):
            self.manager.wait()
        if report.step in self.manager.steps():
            return
        if not report.ending:  # or an evaluation may still come
            self._look_for_best(report)
        for listener in self.listeners:
            listener.before_save(report.step)
        report.flush()  # what was measured before a checkpoint must not be lost with what comes after it
        with self._surviving(report):
            extra = {HOOKS: report.hook_states()}
            self.manager.save(report.step, report.state, metrics=self._metrics(report), extra=extra)
            if self.listeners:
                self.manager.wait()
        for listener in self.listeners if report.step in self.manager.steps() else ():
            if listener.after_save(report.step):
                report.stop(
                    f"{type(listener).__name__} asked to after the checkpoint of step {report.step}"
                )

    def _complete(self, report: Report) -> None:
        """Add what came after the last step was saved, such as an evaluation at the end."""
        if self.read_only:
            return
        self._look_for_best(report)
        with self._surviving(report):
            if report.published and report.step in self.manager.steps():
                states = {**self.manager.extra(report.step).get(HOOKS, {}), **report.hook_states()}
                self.manager.complete(
                    report.step, metrics=self._metrics(report), extra={HOOKS: states}
                )

    def _metrics(self, report: Report) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in report.values().items()
            if not isinstance(value, str)
        }

    def _look_for_best(self, report: Report) -> None:
        """Report once that the metric which the best are chosen by is missing."""
        metrics, retention = self._metrics(report), self.manager.retention
        if (
            retention.best
            and retention.metric not in metrics
            and metrics
            and not self._looked_for_best
        ):
            self._looked_for_best = True
            report.notice(
                f"best_metric {retention.metric!r} is not known at step {report.step}, so it cannot rank as best; "
                f"known are {', '.join(metrics)}"
            )

    @contextmanager
    def _surviving(self, report: Report) -> Iterator[None]:
        """What goes wrong while saving ends the run, unless it is not to."""
        try:
            yield
        except SaveError as error:
            if self.on_error == "stop":
                raise
            report.notice(f"{error}; training goes on")
