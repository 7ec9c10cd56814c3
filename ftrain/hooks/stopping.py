"""Hooks that stop a run: at a step, at a value of a metric, or when one becomes NaN."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ftrain.training import Hook, ReplayError, Report, StepMetrics, Trigger, at, every, never
from ftrain.training.hook import GUARD, Value
from ftrain.training.step_metrics import NAN_IF_UNKNOWN, UnknownMetricError
from ftrain.training.stopping import DATA_ENDED

WATCHED = ("loss", "gradient_norm")  # metrics that StopOnNaN watches by default


class NonFiniteError(RuntimeError):
    """A metric became NaN or infinite at `step`."""

    retryable = False  # a restart would repeat the same steps

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class StopAtStep(Hook):
    """Stop after step `last_step`, or after `num_steps` steps.

    A run that has reached that step takes no step; TensorFlow 1 takes one. As there, `num_steps`
    are counted from the step where the hook was first used, also if the run recovers or the hook is
    used again. That step is not saved: a run that another process resumes takes `num_steps` again.
    Use `last_step` for a total.
    """

    def __init__(self, last_step: int | None = None, *, num_steps: int | None = None):
        if (last_step is None) == (num_steps is None):
            raise ValueError("StopAtStep needs either last_step or num_steps")
        for what, value in (("the last step", last_step), ("num_steps", num_steps)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{what} must be a whole number >= 1, got {value}")
        self.last_step = last_step
        self.num_steps = num_steps
        self.when = never() if last_step is None else at(last_step)

    def begin(self, report: Report) -> None:
        if self.last_step is None:
            self.last_step = report.step + (self.num_steps or 0)
            self.when = at(self.last_step)
        if report.step >= self.last_step:
            self.after_step(report)

    def after_step(self, report: Report) -> None:
        report.stop(f"step {self.last_step} was the last one asked for")

    def end(self, report: Report) -> None:
        if report.stop_reason == DATA_ENDED and report.step < (self.last_step or 0):
            report.notice(f"{DATA_ENDED} after step {report.step}, before step {self.last_step}")


class StopWhen(Hook):
    """Stop early: when a metric reaches `threshold`, or has not improved `patience` times in a row.

    It checks the metrics of the steps that `when` chooses, and values that other hooks publish,
    such as "eval/accuracy", at any step. An evaluation at the end of the run does not count.

    Its memory is saved in each checkpoint. A resumed run stops where the uninterrupted run would
    have stopped. A stopped run takes no further step when it is started again, unless `patience` or
    `threshold` now allow it.
    """

    def __init__(
        self,
        metric: str,
        *,
        patience: int | None = None,
        threshold: float | None = None,
        mode: Literal["min", "max"] = "min",
        least_change: float = 0.0,
        when: Trigger = every(steps=100),
    ):
        if patience is None and threshold is None:
            raise ValueError("StopWhen needs patience, or a threshold, or both")
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be >= 1, got {patience}")
        if mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", got {mode!r}')
        self.metric = metric
        self.patience = patience
        self.threshold = threshold
        self.when = when
        self.mode = mode
        self.least_change = least_change
        self.label = f"{metric}, {mode}"
        self._sign = 1.0 if mode == "min" else -1.0  # the smaller, the better
        self._goal = math.inf  # the value to improve on, times the sign
        self._best = math.inf  # the best value so far, times the sign
        self._looks = 0  # without an improvement
        self._last: tuple[int, float] | None = None  # the step and the value of the last look
        self._report: Report | None = None  # from `begin`; it stops the run
        self._seen = False

    def begin(self, report: Report) -> None:
        report.listen(published=self._look)
        self._goal = math.inf
        self._best = math.inf
        self._looks = 0
        self._last = None
        self._report = report

    def state(self) -> dict[str, float] | None:
        if self._last is None:
            return None
        step, value = self._last
        goal = self._sign * self._goal
        best = self._sign * self._best
        return {"step": step, "value": value, "best": best, "goal": goal, "looks": self._looks}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._last = state["step"], state["value"]
        self._goal = self._sign * state["goal"]
        self._best = self._sign * state["best"]
        self._looks = state["looks"]
        self._seen = True
        self._stop_if_reached()

    def after_step(self, report: Report) -> None:
        self._look(report.step, report.values())

    def _look(self, step: int, values: Mapping[str, Value]) -> None:
        value = values.get(self.metric)
        if value is None or isinstance(value, str):
            return
        self._seen = True
        if self._report is not None and self._report.ending:
            return  # a run with more steps would not have looked here
        self._last = step, value
        self._best = min(self._best, self._sign * value)
        if self._sign * value < self._goal - self.least_change:
            self._goal = self._sign * value
            self._looks = 0
        else:
            self._looks += 1
        self._stop_if_reached()

    def _stop_if_reached(self) -> None:
        reason = self._reason()
        if reason is not None and self._report is not None:
            self._report.notice(f"stopping: {reason}")
            self._report.stop(reason)

    def _reason(self) -> str | None:
        """Return the reason to stop after the last look, or None."""
        if self._last is None:
            return None
        step, value = self._last
        if self.threshold is not None and self._sign * value <= self._sign * self.threshold:
            return (
                f"{self.metric} is {value:.4g} at step {step}, which reaches the threshold "
                f"{self.threshold:g}"
            )
        if self.patience is not None and self._looks >= self.patience:
            best = f"its best was {self._sign * self._best:.4g}"
            return (
                f"{self.metric} has not improved {self._looks} times in a row by step {step}; "
                f"{best}"
            )
        return None

    def end(self, report: Report) -> None:
        if not self._seen and report.values():
            there = ", ".join(report.values())
            report.notice(
                f"StopWhen has never seen the metric {self.metric}; at the end there are {there}"
            )


class StopOnNaN(Hook):
    """Raise NonFiniteError, or stop, when a metric becomes NaN or infinite at any step.

    By default it watches `loss` and `gradient_norm`; of a step that has neither, all metrics except
    `learning_rate`, where NaN means unknown. A name in `metrics` that the step does not have is an
    error.

    A non-finite gradient makes the parameters non-finite one step before the loss shows it, so both
    are watched. A step whose update was skipped, by a guard or by loss scaling, is ignored.
    TensorFlow 1 ignores infinities. The loop does not wait for this hook, so a few later steps may
    have been taken; nothing of them is saved, unless `action` is "stop" and the last metrics are
    finite again.

    With `locate` the step is taken again, from the newest checkpoint or the start, and the error
    names the first non-finite leaf of parameters, metrics or gradients.
    """

    order = GUARD

    def __init__(
        self,
        metrics: str | Sequence[str] | None = None,
        *,
        action: Literal["raise", "stop"] = "raise",
        locate: bool = False,
    ):
        if action not in ("raise", "stop"):
            raise ValueError(f'action must be "raise" or "stop", got {action!r}')
        self.metrics = (
            None if metrics is None else (metrics,) if isinstance(metrics, str) else tuple(metrics)
        )
        self.action = action
        self.locate = locate
        self._report: Report | None = None  # from `begin`; it stops the run, and takes steps again
        self._names: tuple[str, ...] | None = None  # the metrics of a step
        self._watched: tuple[str, ...] = ()  # those of them that are watched

    def begin(self, report: Report) -> None:
        self._report = report
        report.listen(metrics=self._watch)

    def _watch(self, metrics: StepMetrics) -> None:
        if self._names != metrics.names:
            self._names = metrics.names
            self._watched = self._choose(metrics.names)
        if np.isfinite(metrics.table()).all():  # this runs for every step, and must be quick
            return
        if np.isfinite([metrics.column(name) for name in self._watched]).all():
            return
        for step in range(metrics.first, metrics.last + 1):
            row = metrics.row(step)
            bad = next((name for name in self._watched if not math.isfinite(row[name])), None)
            if bad is not None and not row.get("update_skipped"):
                self._stop(bad, step, row)
                return

    def _choose(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the metrics to watch, of those that a step has."""
        if self.metrics is None:
            usual = tuple(name for name in WATCHED if name in names)
            return usual or tuple(name for name in names if name not in NAN_IF_UNKNOWN)
        missing = [name for name in self.metrics if name not in names]
        if missing:
            raise UnknownMetricError(
                f"StopOnNaN cannot watch {', '.join(missing)}: the step has no such metric; "
                f"it has {', '.join(names) or 'none'}"
            )
        return self.metrics

    def _stop(self, name: str, step: int, row: Mapping[str, float]) -> None:
        skipped = row.get("updates_skipped")
        before = f" after {skipped:.0f} skipped updates" if skipped else ""
        found = f"{name} is {row[name]} at step {step}{before}"
        where = f"\n{self._locate(step)}" if self.locate else ""
        if self.action == "stop" and self._report is not None:
            self._report.notice(f"stopping: {found}{where}")
            self._report.stop(found + where)
            return
        raise NonFiniteError(
            f"{found}; neither this step nor later ones are saved.{where}\n"
            "A smaller learning rate may help, or clip_global_norm, or a guard; "
            "StopOnNaN(locate=True) finds where it began",
            step,
        )

    def _locate(self, step: int) -> str:
        try:
            found = self._report.past(step).locate() if self._report is not None else []
        except ReplayError as error:
            return f"Where it began is unknown: {error}"
        return (
            f"It began in {found[0]}." if found else "Taken again, the step is finite throughout."
        )
