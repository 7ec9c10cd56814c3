"""Timing: what the time of a run is spent on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

clock = time.perf_counter


class Timing:
    """Seconds by activity. The rest of the total is spent in the loop itself."""

    def __init__(self) -> None:
        self.data = 0.0  # waiting for batches
        self.dispatch = 0.0  # dispatching calls
        self.device = 0.0  # waiting for the device
        self.others: dict[str, float] = {}  # hooks, compiling, starting
        self.doing: str | None = None  # the current one of the others
        self._started = clock()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `name`."""
        started = clock()
        before = self.doing
        self.doing = name
        try:
            yield
        finally:
            self.doing = before
            self.add(name, clock() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to `name`."""
        self.others[name] = self.others.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """The seconds of each activity so far, largest first, and the rest."""
        known = {
            "waiting for data": self.data,
            "dispatching steps": self.dispatch,
            "waiting for the device": self.device,
            **self.others,
        }
        rest = clock() - self._started - sum(known.values())
        return dict(sorted((known | {"the loop itself": rest}).items(), key=lambda item: -item[1]))
