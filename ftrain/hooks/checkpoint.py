"""The hooks that save and restore checkpoints, and wait for those of another run."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import jax

from ftrain.checkpoints import CheckpointManager, InUseError, LeafMismatchError, SaveError, hold
from ftrain.checkpoints.lock import is_still_held
from ftrain.training import Hook, Report, TrainState, Trigger, every
from ftrain.training.hook import StateSaver

HOOKS = "hooks"  # the entry of a checkpoint that has the states of hooks
LOCK = "saver.lock"  # in the directory of checkpoints, held by the process that saves there
_OTHER_MODEL = (
    "the run there trains another model, or with another optimizer: choose another directory, "
    "or start from its parameters by a warm start"
)


class SaveListener:
    """Called around every checkpoint. Override what you need."""

    def begin(self) -> None:
        """Called once, before the first step."""

    def before_save(self, step: int) -> None:
        """Called before a checkpoint is saved."""

    def after_save(self, step: int) -> bool | None:
        """Called after a checkpoint was written; return True to stop the run."""

    def end(self, step: int) -> None:
        """Called once, after the last checkpoint, unless an exception ended the run."""


class CheckpointSaver(StateSaver):
    """Start from the newest checkpoint in `directory`; save there at chosen steps and at the end.

    TensorFlow 1 also saves the state it starts with; here that needs `at_start`. A step that is
    saved already is not saved again. `CheckpointManager` documents which checkpoints are kept, and
    which are set aside as suspect. Its metrics are those of the step and what was published at it:
    `best_metric` may be `eval/accuracy`, with `best_mode="max"`, if both hooks are due at the same
    steps. Values published at the end of the run are added to the last checkpoint. The states of
    the hooks are saved with the state. With `listeners` training waits for each checkpoint.

    With `restore_best`, which needs `keep_best`, a run that ends has the state of its best
    checkpoint: `Run.state` and what `train` returns. The state after the last step is saved as
    always and stays the latest, so that a run with more steps resumes from it. The best checkpoint
    is the result of the run: `ftrain.load` and `ftrain eval` take it by default.

    If a checkpoint cannot be written, for example because the disk is full, the run ends, unless
    `on_error` is "continue". One saver at a time works in a directory, and holds a lock there. In a
    process that waits for the checkpoints of another one, `Scaffold(wait_secs=...)`, the hook
    restores, saves nothing, and needs no lock.
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
        restore_best: bool = False,
        listeners: Sequence[SaveListener] = (),
    ):
        for listener in listeners:
            if not isinstance(listener, SaveListener):
                raise TypeError(
                    f"listeners must be instances of ftrain.hooks.SaveListener, got {listener!r}"
                )
        if on_error not in ("stop", "continue"):
            raise ValueError(f"on_error must be 'stop' or 'continue', got {on_error!r}")
        if restore_best and not keep_best:
            raise ValueError(
                "restore_best needs keep_best, the number of best checkpoints to keep: set it to "
                "1, and best_metric and best_mode, such as 'eval/accuracy' and 'max'"
            )
        self.when = when
        self.at_start = at_start
        self.restore_best = restore_best
        self.replaces_final_state = restore_best
        self.listeners = listeners
        self.on_error = on_error
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
        self._has_warned = False  # that the metric of the best checkpoints is missing
        self._hook_states: dict[str, Any] | None = None  # of the checkpoint that was restored

    def restore_state(self, like: TrainState) -> TrainState | None:
        if not self._begun:
            self._begun = True
            for listener in self.listeners:
                listener.begin()
        if self._lock is None and jax.process_index() == 0 and not self.read_only:
            directory = self.manager.directory
            self._lock_path = directory / LOCK
            self._lock = hold(self._lock_path, f"{directory} is in use")
        self.manager.__enter__()  # close() leaves it
        self.manager.wait()
        self._unfinished = self.manager.unfinished()
        self._hook_states = None
        if self.manager.is_empty():
            return None
        try:
            state: TrainState = self.manager.restore(like=like)
        except LeafMismatchError as error:
            differences = _name_model_state(error.differences, like)
            raise LeafMismatchError(error.path, differences, _OTHER_MODEL) from None
        assert self.manager.restored is not None
        self._hook_states = self.manager.extra(self.manager.restored).get(HOOKS, {})
        return state

    def result(self) -> Literal["best"] | None:
        """Return the step of the run's result for `restore`: None for the latest good one."""
        return "best" if self.restore_best else None

    def final_state(self, report: Report) -> TrainState | None:
        if self.read_only:
            return None
        step = self.manager.best()
        if step is None:
            report.notice(
                f"the run keeps the state of step {report.step}: no checkpoint has "
                f"{self.manager.retention.metric!r}, which decides what is best"
            )
            return None
        if step == report.step:
            return None
        state: TrainState = self.manager.restore(like=report.state, step=step)
        report.notice(f"the run ends with its best state, of step {step}")
        return state

    def saved_hook_states(self) -> Mapping[str, Mapping[str, Any]] | None:
        return self._hook_states

    def begin(self, report: Report) -> None:
        self.manager.on_warning = report.notice
        if self.read_only:
            report.notice(
                f"another process writes {self.manager.directory}; "
                "this process saves no checkpoints"
            )
            return
        for step in self._unfinished:
            report.notice(
                f"the save of step {step} was never finished; "
                f"the run resumes from step {report.step}"
            )
        if suspects := [step for step in self.manager.suspects() if step > report.step]:
            report.notice(
                f"the state of step {suspects[0]} was non-finite and was set aside as "
                f"{suspects[0]}.suspect; the run resumes from step {report.step}"
            )
        retention = self.manager.retention
        if not retention.best and retention.metric != "loss":
            report.notice(
                f"best_metric {retention.metric!r} is ignored: keep_best is 0; set it to the "
                "number of best checkpoints to keep"
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
                f"the lock {self._lock_path} was deleted, and another process has taken it; "
                "this run stops: use one directory for each run, and do not delete its lock"
            )
        with self._surviving(report):
            self.manager.wait()
        if report.step in self.manager.steps():
            return
        if not report.ending:  # at the end an evaluation may follow
            self._check_best_metric(report)
        for listener in self.listeners:
            listener.before_save(report.step)
        report.flush()  # a checkpoint must not be newer than the metrics that were written
        with self._surviving(report):
            extra = {HOOKS: report.hook_states()}
            self.manager.save(report.step, report.state, metrics=self._metrics(report), extra=extra)
            if self.listeners:
                self.manager.wait()
        for listener in self.listeners if report.step in self.manager.steps() else ():
            if listener.after_save(report.step):
                report.stop(
                    f"{type(listener).__name__} requested it "
                    f"after the checkpoint of step {report.step}"
                )

    def _complete(self, report: Report) -> None:
        """Add values that came after the last step was saved, such as an evaluation at the end."""
        if self.read_only:
            return
        self._check_best_metric(report)
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

    def _check_best_metric(self, report: Report) -> None:
        """Warn, once, if the metric that the best checkpoints are chosen by is missing."""
        metrics = self._metrics(report)
        retention = self.manager.retention
        is_missing = retention.best and metrics and retention.metric not in metrics
        if is_missing and not self._has_warned:
            self._has_warned = True
            report.notice(
                f"best_metric {retention.metric!r} is missing at step {report.step}, so it cannot "
                f"rank as best; there are {', '.join(metrics)}"
            )

    @contextmanager
    def _surviving(self, report: Report) -> Iterator[None]:
        """Show an error of saving instead of raising it, if the run is to continue."""
        try:
            yield
        except SaveError as error:
            if self.on_error == "stop":
                raise
            report.notice(f"{error}; training continues")


class WaitForStep(Hook):
    """Before the first step, wait until another run has saved `step` or a later one in `directory`.

    That is a directory of checkpoints or of a run, which may be created later. Alternatively `read`
    returns the step of the other run. Raises TimeoutError after `timeout` seconds; None waits
    forever.
    """

    def __init__(
        self,
        step: int,
        directory: str | Path | None = None,
        *,
        read: Callable[[], int] | None = None,
        timeout: float | None = None,
        poll_secs: float = 0.5,
        sleep: Callable[[float], None] = time.sleep,
    ):
        if (directory is None) == (read is None):
            raise ValueError(
                "WaitForStep needs either a directory of checkpoints or a function `read`"
            )
        self.step = step
        self.timeout = timeout
        self.poll_secs = poll_secs
        self._sleep = sleep
        manager = None if directory is None else CheckpointManager(directory)
        self.read = read or (lambda: 0 if manager is None else manager.latest() or 0)

    def begin(self, report: Report) -> None:
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        while max(reached := self.read(), report.step) < self.step and not report.stop_reason:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"step {self.step} was not reached within {self.timeout:g} s; "
                    f"the other run is at step {reached}"
                )
            self._sleep(self.poll_secs)


def _name_model_state(differences: list[str], like: TrainState) -> list[str]:
    """Return the differences, in one phrase if only one of the two sides has a model state."""
    place = "leaf model_state/"
    of_it = [phrase for phrase in differences if phrase.startswith(place)]
    kinds = {phrase.rpartition(" is ")[2] for phrase in of_it}
    expected = len(jax.tree.leaves(like.model_state))
    some = ", ".join(phrase.split()[1].removeprefix("model_state/") for phrase in of_it[:3])
    some += ", ..." if len(of_it) > 3 else ""
    if kinds == {"missing"} and len(of_it) == expected:
        phrase = f"it has no model_state, and the model of this run has one ({some})"
    elif kinds == {"not expected"} and not expected:
        phrase = f"it has a model_state ({some}), and the model of this run has none"
    else:
        return differences
    return [phrase, *(each for each in differences if each not in of_it)]
