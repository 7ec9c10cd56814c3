"""The hook that traces steps for TensorBoard's profile page."""

import itertools
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from ftrain.paths import local_path
from ftrain.training import Hook, Report, Trigger

PROFILES = Path("plugins", "profile")  # where TensorBoard looks: one directory per trace


class Profiler(Hook):
    """Trace `steps` steps, starting at each step of `at_steps`, for TensorBoard's profile page.

    With `every_steps` instead of `at_steps`, start at each multiple of it. The default is step 10.

    Each trace has a directory named after its first step, `plugins/profile/step_00000010` in
    `directory`; a trace of an earlier attempt is kept, and the new one is `step_00000010_2`. A
    trace is also written if the run ends or fails during it. A run that resumes between two traced
    steps traces the rest of them. `pip install xprof` adds the page to TensorBoard.
    """

    chief_only = True

    def __init__(
        self,
        directory: str | Path,
        *,
        at_steps: Sequence[int] | None = None,
        every_steps: int | None = None,
        steps: int = 5,
    ):
        if at_steps is not None and every_steps is not None:
            raise ValueError("Profiler takes at_steps or every_steps, not both")
        starts = (
            ()
            if every_steps is not None
            else (10,)
            if at_steps is None
            else tuple(sorted(at_steps))
        )
        if steps < 1 or any(step < 1 for step in starts):
            raise ValueError(f"steps and at_steps must be >= 1, got {steps} and {list(starts)}")
        if every_steps is not None and every_steps < steps:
            raise ValueError(
                f"every_steps must be >= steps, got {every_steps} and {steps}: "
                "the traces would overlap"
            )
        if any(later - earlier < steps for earlier, later in itertools.pairwise(starts)):
            raise ValueError(f"traces must not overlap, got {steps} steps from {list(starts)}")
        self.directory = local_path(directory)
        self.when: Trigger = _Windows(starts, every_steps, steps)
        self._windows = self.when
        self._traced: int | None = None  # the first step of the current trace

    def begin(self, report: Report) -> None:
        self.close()
        self._start(report)

    def after_step(self, report: Report) -> None:
        self.close()
        self._start(report)

    def end(self, report: Report) -> None:
        is_empty = self._traced is not None and self._traced > report.step
        self._stop(keep=not is_empty)

    def close(self) -> None:
        self._stop()

    def _stop(self, *, keep: bool = True) -> None:
        """End the current trace, if there is one, and write it."""
        if self._traced is None:
            return
        step = self._traced
        self._traced = None
        jax.profiler.stop_trace()
        if keep:
            self._put_in_place(step)
        shutil.rmtree(self._staged, ignore_errors=True)

    def _start(self, report: Report) -> None:
        """Start a trace if the next step is to be traced."""
        if not self._windows.covers(report.step + 1) or report.stop_reason is not None:
            return
        shutil.rmtree(self._staged, ignore_errors=True)
        try:
            jax.profiler.start_trace(self._staged)
        except RuntimeError as error:  # a process has one profiler, and the user may be using it
            report.notice(f"step {report.step + 1} is not profiled: {error}")
        else:
            self._traced = report.step + 1

    @property
    def _staged(self) -> Path:
        """Where JAX writes: it names traces by the second, so two of one second would be mixed."""
        return self.directory / f".profiling.{os.getpid()}"

    def _put_in_place(self, step: int) -> None:
        """Rename a trace to a name that is not used yet."""
        profiles = self.directory / PROFILES
        profiles.mkdir(parents=True, exist_ok=True)
        for trace in (self._staged / PROFILES).glob("*"):
            names = itertools.chain(
                [f"step_{step:08}"], (f"step_{step:08}_{n}" for n in itertools.count(2))
            )
            trace.rename(next(profiles / name for name in names if not (profiles / name).exists()))


@dataclass(frozen=True)
class _Windows(Trigger):
    """Due before the first step and after the last step of each window of `length` steps."""

    starts: tuple[int, ...]
    every: int | None
    length: int

    def covers(self, step: int) -> bool:
        """Return whether `step` is in a window."""
        if self.every is not None:
            return step >= self.every and step % self.every < self.length
        return any(start <= step < start + self.length for start in self.starts)

    def next(self, step: int, fired: int | None = None) -> float:
        starts = self.starts
        if self.every is not None:
            number = max(1, (step + 1) // self.every)
            starts = (number * self.every, (number + 1) * self.every)
        edges = (edge for start in starts for edge in (start - 1, start - 1 + self.length))
        return min((edge for edge in edges if edge > step), default=math.inf)
