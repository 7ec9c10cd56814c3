"""Hooks that measure speed, and write metrics to event files and metrics.jsonl."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from ftrain.paths import local_path
from ftrain.summaries import BackgroundWriter, MetricsFile, SummaryWriter
from ftrain.training import Hook, Report, StepMetrics, Trigger, every
from ftrain.training.hook import MEASURE, WRITE, Value

SHORTEST = 0.25  # seconds; over less time, delays of the operating system would show


class Speed:
    """Steps per second since the last measurement or, if that is too recent, an earlier one.

    The loop notices a finished step a little late. Over `SHORTEST` seconds that makes no
    difference.
    """

    def __init__(self) -> None:
        # Steps, and when they finished; speed is measured since the first of them.
        self._marks: deque[tuple[int, float]] = deque()

    def clear(self) -> None:
        """Forget all measurements."""
        self._marks.clear()

    def start(self, step: int, time: float) -> None:
        """Measure from this step on, unless that has started already."""
        if not self._marks:
            self._marks.append((step, time))

    def measure(self, step: int, time: float) -> float | None:
        """Return steps per second up to this step; None at first, or if no time has passed."""
        while len(self._marks) > 1 and time - self._marks[1][1] >= SHORTEST:
            self._marks.popleft()
        first, moment = self._marks[0] if self._marks else (step, time)
        self._marks.append((step, time))
        return (step - first) / (time - moment) if step > first and time > moment else None


class StepCounter(Hook):
    """Publish `steps_per_second` since the last time, and examples and operations per second.

    Time is taken when steps finish. If the last measurement is less than a quarter of a second old,
    an earlier one is used. The first one is the end of the first step, so compilation is excluded.
    `examples_per_second` needs batches whose arrays share their first axis, `flops_per_second` a
    compiler that reports the cost of a step.
    """

    needs_state = False
    order = MEASURE

    def __init__(self, *, when: Trigger = every(steps=100)):
        self.when = when
        self._speed = Speed()

    def begin(self, report: Report) -> None:
        report.listen(metrics=self._start)
        self._speed.clear()

    def _start(self, metrics: StepMetrics) -> None:
        self._speed.start(metrics.last, metrics.time)

    def after_step(self, report: Report) -> None:
        speed = self._speed.measure(report.step, report.time)
        if speed is None:
            return
        flops = report.flops()
        measured = {"steps_per_second": speed}
        if report.examples:
            measured["examples_per_second"] = speed * report.examples
        if flops:
            measured["flops_per_second"] = speed * flops
        report.publish(measured)


class SummarySaver(Hook):
    """Write metrics and published values to an event file for TensorBoard and to `metrics.jsonl`.

    A thread writes; before a checkpoint is saved the run waits for pending writes. The last step is
    always written, at the end of the run; TensorFlow 1 does not do that.
    """

    needs_state = False
    chief_only = True
    order = WRITE

    def __init__(self, directory: str | Path, *, when: Trigger = every(steps=100)):
        self.directory = local_path(directory)
        self.when = when
        self._writer: BackgroundWriter | None = None
        self._written = 0  # the newest step whose metrics were written

    def begin(self, report: Report) -> None:
        report.listen(published=self._write, flush=self._flush)
        self.close()
        metrics = MetricsFile(self.directory / "metrics.jsonl", start_step=report.step)
        self._written = report.step
        events = SummaryWriter(self.directory, start_step=report.step)
        self._writer = BackgroundWriter([metrics, events], report.coordinator)

    def after_step(self, report: Report) -> None:
        self._write(report.step, report.values())
        self._written = report.step

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._writer is not None:
            self._writer.write(step, values)

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def end(self, report: Report) -> None:
        if self._written != report.step:
            own = {
                name: value
                for name, value in report.values().items()
                if name not in report.published
            }
            if own:  # what was published is written
                self._write(report.step, own)
        self._flush()

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
