"""Timing: where the time of a run went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

clock = time.perf_counter


class Timing:
    """Seconds by what they were spent on. What is left of the whole is Python's own share."""

    def __init__(self) -> None:
        self.data = self.dispatch = self.device = 0.0  # what every call adds to
        self.others: dict[str, float] = {}  # hooks, and what comes once
        self.doing: str | None = None  # which of them it is now
        self._started = clock()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the seconds of the block to `name`."""
        started, before, self.doing = clock(), self.doing, name
        try:
            yield
        finally:
            self.doing = before
            self.add(name, clock() - started)

    def add(self, name: str, seconds: float) -> None:
        self.others[name] = self.others.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """All of it so far, the largest first, and what is left."""
        known = {
            "waiting for data": self.data,
            "dispatching steps": self.dispatch,
            "waiting for the device": self.device,
            **self.others,
        }
        rest = clock() - self._started - sum(known.values())
        return dict(sorted((known | {"the loop itself": rest}).items(), key=lambda item: -item[1]))
