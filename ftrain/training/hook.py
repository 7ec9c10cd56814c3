"""Hooks: what happens around the steps, and the report that tells them of a step."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from ftrain.training.packing import StepMetrics
from ftrain.training.state import TrainState
from ftrain.training.trigger import Trigger, never

Value = float | str  # a number, or a text


class Report:
    """What hooks are told of a step."""

    def __init__(
        self,
        step: int,
        state: TrainState | None,
        metrics: StepMetrics,
        *,
        publish: Callable[[Mapping[str, Value]], None],
        request_stop: Callable[[str], None],
        interrupted: bool = False,
    ):
        self.step = step  # steps taken, this one included
        self.time = time.monotonic()
        self.interrupted = interrupted  # whether the run is asked to end soon: save, and leave out what takes long
        self._state, self._metrics = state, metrics
        self._publish, self._request_stop = publish, request_stop
        self.published: dict[str, Value] = {}  # what hooks have published at this step so far

    @property
    def state(self) -> TrainState:
        """The state after the step. Valid during the call only: the next step writes over it."""
        if self._state is None:
            raise RuntimeError(f"the state of step {self.step} is gone: a hook that reads it needs needs_state = True")
        return self._state

    def values(self) -> dict[str, Value]:
        """Every metric of the step, and what hooks published with it so far; waits for the device.

        Empty before the first step.
        """
        return self._metrics.values() | self.published

    def read(self, metric: str) -> float:
        """One metric of the step as a number; waits for the device."""
        return self._metrics.read(metric)

    def publish(self, values: Mapping[str, Value]) -> None:
        """Hand values of your own to all hooks: to those due at this step in `values`, to the others by `receive`."""
        plain = {name: _plain(name, value) for name, value in values.items()}
        self.published.update(plain)
        self._publish(plain)

    def stop(self, reason: str) -> None:
        """Ask the loop to end after this step."""
        self._request_stop(reason)


def _plain(name: str, value: Any) -> Value:
    try:
        return value if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a text to be published, got {value!r:.60}") from None


class Hook:
    """Override what you need; `when` chooses the steps that `after_step` is called for.

    `needs_state` says whether `after_step` reads the state or must stop the run at its very step. The loop then waits
    for the device before it goes on; without, it tells the hook a few steps later, and no time is lost.
    """

    when: Trigger = never()
    needs_state: bool = True

    def start(self, state: TrainState) -> TrainState:
        """Before anything else: the state to start from. A saver answers with the newest checkpoint."""
        return state

    def begin(self, report: Report) -> None:
        """Once, before the first step, when the state is known."""

    def watch(self, step: int, metrics: StepMetrics) -> None:
        """For every step, in order, some steps later, when its metrics are ready and reading them costs no wait.

        It is always called for a step before any hook's `after_step` for the same step.
        """

    def after_step(self, report: Report) -> None:
        """After each step that `when` chooses."""

    def receive(self, step: int, values: Mapping[str, Value]) -> None:
        """Values that another hook published at a step where this one is not due."""

    def end(self, report: Report) -> None:
        """Once, after the last step, unless an exception ended the run. Every hook counts as due."""

    def close(self) -> None:
        """Once, always, even after an exception: let go of threads and files."""
