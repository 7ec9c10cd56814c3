"""The hook that tells a supervisor how far the run is."""

import time
from collections.abc import Callable, Sequence

from ftrain.launching.protocol import Done, Failed, Progress, Stopped
from ftrain.launching.reporter import Reporter, reporter_of_this_process
from ftrain.training.hook import Hook, Report
from ftrain.training.metrics import Metrics
from ftrain.training.replay import PastStep
from ftrain.training.timing import Timing

_EVERY = 0.2  # seconds between two looks at the loss


class ProgressReport(Hook):
    """Tell a `Reporter` of every step that is finished, what keeps the run from the next one, and how it ended."""

    def __init__(self, reporter: Reporter, timing: Timing, taken: Callable[[], int]):
        self.reporter, self._timing, self._taken = reporter, timing, taken
        self._loss: float | None = None
        self._looked = 0.0

    def begin(self, report: Report) -> None:
        self.reporter.doing = lambda: self._timing.doing
        self.reporter.set_step(report.step)
        self.reporter.send(Progress(report.step, self.reporter.steps))

    def watch(self, metrics: Metrics) -> None:
        now = time.monotonic()
        if now - self._looked > _EVERY and "loss" in metrics.names:
            self._looked, self._loss = now, float(metrics.column("loss")[-1])
        self.reporter.set_step(metrics.last, self._loss)

    def end(self, report: Report) -> None:
        self.reporter.set_step(report.step)
        if report.interrupted and report.stop_reason is not None:
            self.reporter.send(Stopped(report.stop_reason.partition(" ")[0]))
        else:
            self.reporter.send(Done(report.step))

    def close(self) -> None:
        self.reporter.doing = lambda: "starting"  # whatever comes after the run

    def failed(self, error: Exception, past: PastStep | None) -> None:
        message = str(error).partition("\n")[0]
        retryable = getattr(error, "retryable", True)
        self.reporter.send(
            Progress(self._taken(), self.reporter.steps)
        )  # what it told last may be long ago
        self.reporter.send(Failed(type(error).__name__, message, retry=retryable))


def with_progress(hooks: Sequence[Hook], timing: Timing, taken: Callable[[], int]) -> list[Hook]:
    """The hooks, and the one that tells whoever started this process, if that is wanted; `taken` counts the steps."""
    reporter = reporter_of_this_process()
    return [*hooks, ProgressReport(reporter, timing, taken)] if reporter.is_supervised else [*hooks]
