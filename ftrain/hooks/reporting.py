"""The hook that tells a supervisor how far the run is."""

import time
from collections.abc import Callable

from ftrain.hooks.stopping import NotFiniteError
from ftrain.launching.contract import Done, Failed, Progress, Stopped
from ftrain.launching.reporter import Reporter
from ftrain.training import Hook, Metrics, Report
from ftrain.training.replay import Past

_EVERY = 0.2  # seconds between two looks at the loss


class ProgressReport(Hook):
    """Tell a `Reporter` of every step that is finished, and how the run ended.

    `doing` answers with what keeps the run from its next step.
    """

    def __init__(self, reporter: Reporter, doing: Callable[[], str | None], steps: int | None = None):
        self.reporter, self._doing, self._steps = reporter, doing, steps
        self._loss: float | None = None
        self._looked = 0.0

    def begin(self, report: Report) -> None:
        self.reporter.steps, self.reporter.doing = self._steps, self._doing
        self.reporter.move(report.step)
        self.reporter.say(Progress(report.step, self._steps))

    def watch(self, metrics: Metrics) -> None:
        now = time.monotonic()
        if now - self._looked > _EVERY and "loss" in metrics.names:
            self._looked, self._loss = now, float(metrics.column("loss")[-1])
        self.reporter.move(metrics.last, self._loss)

    def end(self, report: Report) -> None:
        self.reporter.move(report.step)
        if report.interrupted and report.stop_reason is not None:
            self.reporter.say(Stopped(report.stop_reason.partition(" ")[0]))
        else:
            self.reporter.say(Done(report.step))

    def close(self) -> None:
        self.reporter.doing = lambda: "starting"  # whatever comes after the run

    def failed(self, error: Exception, past: Past | None) -> None:
        message = str(error).partition("\n")[0]
        self.reporter.say(Failed(type(error).__name__, message, retry=not isinstance(error, NotFiniteError)))
