"""The hook that tells how long a command took to get to its first step."""

import time

from ftrain.training import Hook, Metrics


class FirstStep(Hook):
    """Say through another hook, once, how many seconds after `started` the first step was done."""

    chief_only = True

    def __init__(self, started: float, say: Hook):
        self._started, self._say = started, say
        self._said = False

    def watch(self, metrics: Metrics) -> None:
        if not self._said:
            self._said = True
            self._say.notice(f"first step after {time.monotonic() - self._started:.1f} s")
