"""The hook that measures how long a command took to reach its first step."""

import time

from ftrain.training import Hook, Metrics, Report


class FirstStep(Hook):
    """Show, once, how many seconds after `started` the first step was finished."""

    chief_only = True

    def __init__(self, started: float):
        self._started = started
        self._report: Report | None = None
        self._said = False

    def begin(self, report: Report) -> None:
        self._report = report
        report.listen(metrics=self._watch)

    def _watch(self, metrics: Metrics) -> None:
        if not self._said and self._report is not None:
            self._said = True
            self._report.notice(f"first step after {time.monotonic() - self._started:.1f} s")
