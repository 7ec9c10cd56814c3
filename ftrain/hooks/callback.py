"""Hooks that call a function of the user."""

from collections.abc import Callable, Mapping
from typing import Any

from ftrain.training import Hook, Report, TrainState, Trigger, every
from ftrain.training.loss import Batch


class Callback(Hook):
    """Call `function(report)` at the steps that `when` chooses. It may read, publish and stop."""

    def __init__(
        self,
        function: Callable[[Report], Any],
        *,
        when: Trigger = every(steps=100),
        needs_state: bool = True,
    ):
        self.function = _checked(function)
        self.when = when
        self.needs_state = needs_state

    def after_step(self, report: Report) -> None:
        self.function(report)


class FeedBatch(Hook):
    """Put the dict of arrays that `function(step)` returns into every batch; `step` counts from 0.

    Two hooks that feed the same entry are an error. An entry of the data is replaced; TensorFlow 1
    refuses that. Raise StopIteration to end the run. Steps are not fused.
    """

    changes_batch = True

    def __init__(self, function: Callable[[int], Mapping[str, Any]]):
        self.function = _checked(function)

    def before_step(self, report: Report, batch: Batch) -> Mapping[str, Any]:
        return self.function(report.step)


class FinalOps(Hook):
    """Call `function(state)` at the end of a run and keep its `result`; publish its numbers."""

    def __init__(self, function: Callable[[TrainState], Any]):
        self.function = _checked(function)
        self.result: Any = None

    def end(self, report: Report) -> None:
        self.result = self.function(report.state)
        if isinstance(self.result, Mapping):
            report.publish(
                {
                    name: value
                    for name, value in self.result.items()
                    if isinstance(value, (int, float, str))
                }
            )


def _checked(function: Any) -> Any:
    if not callable(function):
        raise TypeError(f"function must be callable, got {function!r}")
    return function
