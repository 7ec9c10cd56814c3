"""The hook that waits for another process."""

import time
from collections.abc import Callable
from pathlib import Path

from ftrain.checkpoints import CheckpointManager
from ftrain.training import Hook, Report


class WaitForStep(Hook):
    """Before the first step, wait until another process has come to `step`, by its newest checkpoint in `directory`.

    That is a directory of checkpoints or of a run, which may be created later.

    `read` can tell it instead, in any other way. TimeoutError after `timeout` seconds; without, there is no limit.
    """

    def __init__(
        self,
        step: int,
        directory: str | Path | None = None,
        *,
        read: Callable[[], int] | None = None,
        timeout: float | None = None,
        poll_secs: float = 0.5,
        sleep: Callable[[float], None] = time.sleep,
    ):
        if (directory is None) == (read is None):
            raise ValueError(
                "WaitForStep needs either a directory of checkpoints or read, a function"
            )
        self.step, self.timeout, self.poll_secs, self._sleep = step, timeout, poll_secs, sleep
        manager = None if directory is None else CheckpointManager(directory)
        self.read = read or (lambda: 0 if manager is None else manager.latest() or 0)

    def begin(self, report: Report) -> None:
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        while max(reached := self.read(), report.step) < self.step and not report.stop_reason:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"step {self.step} was not reached within {self.timeout:g} s; it is at {reached}"
                )
            self._sleep(self.poll_secs)
