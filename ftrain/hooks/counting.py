"""The hook that measures speed."""

import time

from ftrain.training import Hook, Report, Trigger, every


class StepCounter(Hook):
    """Publish `steps_per_second`, measured since the last time; the first measurement leaves out compilation."""

    needs_state = False

    def __init__(self, *, when: Trigger = every(steps=100)):
        self.when = when
        self._last: tuple[int, float] | None = None

    def watch(self, step: int, metrics: object) -> None:
        if self._last is None:
            self._last = step, time.monotonic()

    def after_step(self, report: Report) -> None:
        step, moment = self._last or (report.step, report.time)
        if report.step > step:
            report.publish({"steps_per_second": (report.step - step) / (report.time - moment)})
        self._last = report.step, report.time
