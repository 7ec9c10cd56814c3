"""The hook that reports the progress of a run to the supervisor."""

import time
from collections.abc import Sequence

from ftrain.launching.protocol import Done, Failed, Progress, Stopped
from ftrain.launching.reporter import Reporter, reporter_of_this_process
from ftrain.training.hook import Hook, Report
from ftrain.training.hook_dispatch import Position
from ftrain.training.replay import PastStep
from ftrain.training.step_metrics import StepMetrics, Timing

_EVERY = 0.2  # seconds between two looks at the loss


class ProgressReport(Hook):
    """Send every finished step, the current activity, and the end of the run to a `Reporter`."""

    def __init__(self, reporter: Reporter, timing: Timing, position: Position):
        self.reporter = reporter
        self._timing = timing
        self._position = position
        self._loss: float | None = None
        self._looked = 0.0

    def begin(self, report: Report) -> None:
        report.listen(metrics=self._watch, failure=self._failed)
        self.reporter.doing = lambda: self._timing.doing
        self.reporter.set_step(report.step)
        self.reporter.send(Progress(report.step, self.reporter.steps))

    def _watch(self, metrics: StepMetrics) -> None:
        now = time.monotonic()
        if now - self._looked > _EVERY and "loss" in metrics.names:
            self._looked = now
            self._loss = float(metrics.column("loss")[-1])
        self.reporter.set_step(metrics.last, self._loss)

    def end(self, report: Report) -> None:
        self.reporter.set_step(report.step)
        if report.interrupted and report.stop_reason is not None:
            self.reporter.send(Stopped(report.stop_reason.partition(" ")[0]))
        else:
            self.reporter.send(Done(report.step))

    def close(self) -> None:
        self.reporter.doing = lambda: "starting"  # whatever follows the run

    def _failed(self, error: Exception, past: PastStep | None) -> None:
        message = str(error).partition("\n")[0]
        retryable = getattr(error, "retryable", True)
        # The newest progress that was sent may be old.
        self.reporter.send(Progress(self._position.step, self.reporter.steps))
        self.reporter.send(Failed(type(error).__name__, message, retry=retryable))


def with_progress(hooks: Sequence[Hook], timing: Timing, position: Position) -> list[Hook]:
    """Return the hooks and, if a supervisor started this process, the one that reports to it."""
    reporter = reporter_of_this_process()
    return (
        [*hooks, ProgressReport(reporter, timing, position)] if reporter.is_supervised else [*hooks]
    )
