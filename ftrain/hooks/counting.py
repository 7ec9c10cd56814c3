"""The hook that measures speed."""

from ftrain.training import Hook, Metrics, Report, Trigger, every


class StepCounter(Hook):
    """Publish `steps_per_second`, measured since the last time, and with it examples and operations per second.

    The first time is the end of the first step, so that compilation is left out. `examples_per_second` is there if all
    arrays of a batch share their first axis, `flops_per_second` if the compiler tells what a step costs.
    """

    needs_state = False

    def __init__(self, *, when: Trigger = every(steps=100)):
        self.when = when
        self._last: tuple[int, float] | None = None

    def begin(self, report: Report) -> None:
        self._last = None

    def watch(self, metrics: Metrics) -> None:
        self._last = self._last or (metrics.last, metrics.time)

    def after_step(self, report: Report) -> None:
        if self._last is not None and report.time > self._last[1]:
            speed = (report.step - self._last[0]) / (report.time - self._last[1])
            flops = report.flops()
            measured = {"steps_per_second": speed}
            if report.examples:
                measured["examples_per_second"] = speed * report.examples
            if flops:
                measured["flops_per_second"] = speed * flops
            report.publish(measured)
        self._last = report.step, report.time
