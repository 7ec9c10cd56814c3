"""Hooks that call a user's function: at chosen steps, for each batch, at the end, to evaluate."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ftrain.averages import averaged
from ftrain.training import Hook, Report, TrainState, Trigger, every
from ftrain.training.arguments import call_with_model_state
from ftrain.training.loss import Batch

MAX_PUBLISHED = 16  # values of an array that is published


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


class Evaluator(Hook):
    """Publish what `evaluate(params)` returns, as `eval/...`, at chosen steps and at the end.

    If the state has a model state, it is called as `evaluate(params, model_state)`. Numbers and
    strings are published; of arrays, those of up to 16 values, each value under its index, such as
    `eval/f1/0`. Larger ones, such as a confusion matrix, are left out.

    An interrupted run is not evaluated at its end. The checkpoint has the step that was evaluated
    last, so a restarted run with no steps left is evaluated if its last step was not.
    """

    def __init__(
        self,
        evaluate: Callable[..., Mapping[str, Any]],
        *,
        when: Trigger = every(steps=1000),
        use_averages: bool = False,
    ):
        self.evaluate = evaluate
        self.when = when
        self.use_averages = use_averages
        self._evaluated: int | None = None  # the step of the newest evaluation
        self._left_out: set[str] = set()  # arrays that are too large, and the user knows it

    def begin(self, report: Report) -> None:
        if self.use_averages and report.state.averages is None:
            raise ValueError("use_averages needs averages: pass the step a decay, averages=0.999")
        self._evaluated = report.step

    def state(self) -> dict[str, int | None]:
        return {"evaluated": self._evaluated}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._evaluated = state["evaluated"]

    def measure(self, state: TrainState) -> dict[str, Any]:
        """Evaluate a state; return the values, arrays too, under names that start with `eval/`."""
        params = state.params
        if self.use_averages:
            params = averaged(state.averages, state.params)
        measured = call_with_model_state(
            "evaluate", self.evaluate, {"params": params}, state.model_state
        )
        if not isinstance(measured, Mapping):
            raise TypeError(
                f"evaluate must return a dict of numbers and strings, got {measured!r:.60}"
            )
        return {f"eval/{name}": value for name, value in measured.items()}

    def after_step(self, report: Report) -> None:
        measured = self.measure(report.state)
        report.publish(published_values(measured))
        self._evaluated = report.step
        for name, value in measured.items():
            if np.size(value) > MAX_PUBLISHED and name not in self._left_out:
                self._left_out.add(name)
                report.notice(
                    f"{name} is not published: it has {np.size(value)} values, "
                    f"of arrays only up to {MAX_PUBLISHED} are"
                )

    def end(self, report: Report) -> None:
        if self._evaluated != report.step and not report.interrupted:
            report.save()  # a process that is killed during a long evaluation loses no steps
            self.after_step(report)


def published_values(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and strings, with the values of small arrays under their indices.

    >>> published_values({"loss": 0.5, "f1": np.array([0.25, 1.0]), "confusion": np.eye(10)})
    {'loss': 0.5, 'f1/0': 0.25, 'f1/1': 1.0}
    """
    published: dict[str, Any] = {}
    for name, value in measured.items():
        if isinstance(value, str) or np.ndim(value) == 0:
            published[name] = value
        elif np.size(value) == 1:
            published[name] = float(np.asarray(value).reshape(()))
        elif np.size(value) <= MAX_PUBLISHED:
            for index, number in np.ndenumerate(np.asarray(value)):
                published["/".join([name, *map(str, index)])] = float(number)
    return published
