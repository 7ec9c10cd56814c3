"""The hook that evaluates."""

from collections.abc import Callable, Mapping
from typing import Any

from ftrain.averages import averaged
from ftrain.training import Hook, Report, TrainState, Trigger, every
from ftrain.training.hook import Value
from ftrain.tree import Tree


class Evaluator(Hook):
    """Publish what `evaluate(params)` returns, each name prefixed by `eval/`, when it is time and at the end.

    A run that was interrupted is not evaluated at its end. Its last checkpoint knows which step was evaluated last, so
    a run that is started again with nothing left to do is evaluated if that step was not.
    """

    def __init__(
        self,
        evaluate: Callable[[Tree], Mapping[str, Value]],
        *,
        when: Trigger = every(steps=1000),
        use_averages: bool = False,
    ):
        self.evaluate, self.when, self.use_averages = evaluate, when, use_averages
        self._evaluated: int | None = None  # the step of the newest evaluation

    def begin(self, report: Report) -> None:
        if self.use_averages and report.state.averages is None:
            raise ValueError(
                "use_averages needs averages: give the step a decay for them, averages=0.999"
            )
        self._evaluated = report.step

    def state(self) -> dict[str, int | None]:
        return {"evaluated": self._evaluated}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._evaluated = state["evaluated"]

    def measure(self, state: TrainState) -> dict[str, Value]:
        """What the evaluation of a state gives, under the names it is published by."""
        params = state.params
        if self.use_averages:
            params = averaged(state.averages, state.params)
        measured = self.evaluate(params)
        if not isinstance(measured, Mapping):
            raise TypeError(
                f"evaluate must return a dict of numbers and texts, got {measured!r:.60}"
            )
        return {f"eval/{name}": value for name, value in measured.items()}

    def after_step(self, report: Report) -> None:
        report.publish(self.measure(report.state))
        self._evaluated = report.step

    def end(self, report: Report) -> None:
        if self._evaluated != report.step and not report.interrupted:
            report.save()  # whoever kills the process during a long evaluation must not cost it any steps
            self.after_step(report)
