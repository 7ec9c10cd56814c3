"""The hook that measures speed."""

from collections import deque

from ftrain.training import Hook, Metrics, Report, Trigger, every
from ftrain.training.hook import MEASURE

SHORTEST = (
    0.25  # seconds; over less, how long the loop waited for its turn on the processor would show
)


class Speed:
    """Steps per second between finished steps: since the last one measured or, if that is too recent, an earlier one.

    The loop sees a step finish when it looks, not at the very moment. Over `SHORTEST` seconds and more that makes no
    difference.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = (
            deque()
        )  # steps, and when they finished; speed is since the first

    def clear(self) -> None:
        self._marks.clear()

    def start(self, step: int, time: float) -> None:
        """Measure from here on, unless it has been started."""
        if not self._marks:
            self._marks.append((step, time))

    def measure(self, step: int, time: float) -> float | None:
        """Steps per second up to here; None the first time, or if no time has passed."""
        while len(self._marks) > 1 and time - self._marks[1][1] >= SHORTEST:
            self._marks.popleft()
        first, moment = self._marks[0] if self._marks else (step, time)
        self._marks.append((step, time))
        return (step - first) / (time - moment) if step > first and time > moment else None


class StepCounter(Hook):
    """Publish `steps_per_second`, measured since the last time, and with it examples and operations per second.

    Time is taken when steps finish. If the last time is less than a quarter of a second ago, speed is measured since an
    earlier one. The first time is the end of the first step, so that compilation is left out. `examples_per_second` is
    there if all arrays of a batch share their first axis, `flops_per_second` if the compiler tells what a step costs.
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
