"""Measurements: the metrics of steps, in one array per call, and what the time is spent on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

NAN_IF_UNKNOWN = frozenset({"learning_rate"})  # a NaN of these means "unknown", not a failure


class UnknownMetricError(KeyError):
    """A metric that the step does not compute."""

    retryable = False  # a restart would repeat it

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show it in quotes


class StepMetrics:
    """The metrics of steps `first` to `last`. They stay on the device until a hook reads them."""

    def __init__(
        self, first: int, last: int, names: tuple[str, ...] = (), packed: jax.Array | None = None
    ):
        self.first = first
        self.last = last
        self.time = 0.0  # in seconds: when it was dispatched, and then when it was found finished
        self.names = names
        self._packed = packed  # (metrics,) of one step, or (steps, metrics and more)
        self._table: np.ndarray | None = None

    def table(self) -> np.ndarray:
        """One row per step, one column per name; waits for the device."""
        if self._table is None:
            steps = self.last - self.first + 1
            values = np.zeros((steps, 0)) if self._packed is None else np.asarray(self._packed)
            self._table = values.reshape(steps, -1)[:, : len(self.names)]
            self._packed = None  # free the array on the device
        return self._table

    def column(self, name: str) -> np.ndarray:
        """The values of one metric at all steps; waits for the device."""
        if name not in self.names:
            there = ", ".join(sorted(self.names)) or "none yet"
            raise UnknownMetricError(f"there is no metric {name}; there are {there}")
        return self.table()[:, self.names.index(name)]

    def row(self, step: int) -> dict[str, float]:
        """All metrics of one step, by name; waits for the device."""
        return (
            dict(zip(self.names, self.table()[step - self.first].tolist(), strict=True))
            if self.names
            else {}
        )

    def wait(self) -> None:
        """Wait until the steps are finished."""
        if self._packed is not None:
            self._packed.block_until_ready()

    def is_ready(self) -> bool:
        """Whether the steps are finished."""
        packed: Any = self._packed  # its stub lacks is_ready
        return packed is None or packed.is_ready()


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
