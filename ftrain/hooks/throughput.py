"""The hook that measures steps, examples and operations per second."""

from collections import deque

from ftrain.training import Hook, Metrics, Report, Trigger, every
from ftrain.training.hook import MEASURE

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
        """Steps per second up to this step; None the first time, or if no time has passed."""
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

    def _start(self, metrics: Metrics) -> None:
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
