"""The hook that profiles."""

from collections.abc import Sequence
from pathlib import Path

import jax

from ftrain.paths import local_path
from ftrain.training import Hook, Report, at


class Profiler(Hook):
    """Trace `steps` steps from each of the steps in `at_steps` on, for TensorBoard's profile page.

    The traces stand in `directory`, below `plugins/profile`; pip install xprof adds the page to TensorBoard.
    """

    chief_only = True

    def __init__(self, directory: str | Path, *, at_steps: Sequence[int] = (10,), steps: int = 5):
        if steps < 1 or any(step < 1 for step in at_steps):
            raise ValueError(f"a profiler needs steps >= 1, got {steps} from {list(at_steps)} on")
        self.directory = local_path(directory)
        self.begins = [step - 1 for step in at_steps]
        self.ends = [step + steps for step in self.begins]
        overlaps = [b for b in self.begins for e in zip(self.begins, self.ends, strict=True) if e[0] < b < e[1]]
        if overlaps:
            raise ValueError(f"the steps to profile overlap: {steps} from {list(at_steps)} on")
        self.when = at(*(step for step in (*self.begins, *self.ends) if step))
        self._tracing = False

    def begin(self, report: Report) -> None:
        self.close()
        if report.step in self.begins:
            self._start()

    def after_step(self, report: Report) -> None:
        if report.step in self.ends:
            self.close()
        if report.step in self.begins:
            self._start()

    def end(self, report: Report) -> None:
        self.close()

    def close(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()

    def _start(self) -> None:
        jax.profiler.start_trace(self.directory)
        self._tracing = True
