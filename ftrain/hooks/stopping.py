"""Hooks that end a run."""

import math

from ftrain.training import Hook, Report, at
from ftrain.training.packing import StepMetrics


class NotFiniteError(RuntimeError):
    """A metric became NaN or infinite."""


class StopAtStep(Hook):
    """Stop after step `last_step`; a run that has come so far already takes no step at all."""

    def __init__(self, last_step: int):
        if not isinstance(last_step, int) or last_step < 1:
            raise ValueError(f"the last step must be a whole number >= 1, got {last_step}")
        self.last_step = last_step
        self.when = at(last_step)

    def begin(self, report: Report) -> None:
        if report.step >= self.last_step:
            self.after_step(report)

    def after_step(self, report: Report) -> None:
        report.stop(f"step {self.last_step} was the last one asked for")


class StopOnNaN(Hook):
    """Raise NotFiniteError when a metric stops being finite. Looks at every step, and never waits for one.

    The gradient is watched beside the loss: it poisons the parameters one step before the loss shows it. A step whose
    update was skipped, by a guard or by loss scaling, does no harm and is passed over.
    """

    def __init__(self, *metrics: str):
        self.metrics = metrics or ("loss", "gradient_norm")

    def watch(self, step: int, metrics: StepMetrics) -> None:
        if metrics.values().get("update_skipped"):
            return
        for name in self.metrics:
            value = metrics.read(name)
            if not math.isfinite(value):
                skipped = metrics.values().get("updates_skipped")
                before = f" after {skipped:.0f} updates that were skipped" if skipped else ""
                raise NotFiniteError(
                    f"{name} is {value} at step {step}{before}; checkpoints of earlier steps are kept.\n"
                    "A smaller learning rate may help, or clip_global_norm, or a guard; or look at the data, where an "
                    "id beyond its table reads NaN"
                )
