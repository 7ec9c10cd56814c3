"""Stopping: whether a run is to end, why, and, where several processes train, after which step."""

import threading
from collections.abc import Callable

from ftrain.cluster import MismatchError
from ftrain.coordination import Coordinator
from ftrain.training.hook import DATA_ENDED
from ftrain.training.together import Together


class Stopping:
    """Requests to stop, from any thread; the first reason given is kept.

    With other processes a request is a proposal: all of them decide on the last step, and hear of it when they are
    there.
    """

    def __init__(self, coordinator: Coordinator, together: Together | None):
        self.reason: str | None = None
        self.interrupted = False
        self.thread: int | None = None  # the one that takes the steps
        self._is_final = False  # that thread knows of it: no further step may be taken
        self._coordinator, self._together = coordinator, together

    def ask(self, reason: str, *, interrupted: bool = False) -> None:
        if self._together is not None:
            return self._together.ask_to_stop(reason, interrupted=interrupted)
        self.interrupted = self.interrupted or interrupted
        self.reason = self.reason or reason
        if (
            threading.get_ident() == self.thread
        ):  # another thread's request may come just before a step
            self._is_final = True
        return None

    def is_due(self, step: int) -> bool:
        """Whether `step` was the last one; from then on none may be taken."""
        if self._coordinator.should_stop():
            self.ask("a thread asked to")
        self.hear(step)
        self._is_final = self.reason is not None
        return self._is_final

    def hear(self, step: int) -> None:
        """What the processes have decided, if `step` is the last one."""
        if self._together is not None and self._together.is_over(step, wait=True):
            self.interrupted, self.reason = self._together.interrupted, self._together.reason

    def is_coming(self, step: int) -> bool:
        """In a thread, which waits for the data after `step`: whether the run ends anyway."""
        is_over = self._together is not None and self._together.is_over(step)
        return self.interrupted or is_over or self._coordinator.should_stop()

    def check(self) -> None:
        """That a step may be taken."""
        if self._is_final:
            self._coordinator.raise_requested_exception()
            raise RuntimeError(f"the run has been stopped: {self.reason}")

    def revoke(self) -> None:
        """Go back to an earlier step: a hook that asked at one that is taken again will do so again."""
        if self._is_final:
            self.reason, self._is_final = None, False

    def end_data(self, step: int) -> None:
        """There are no data behind `step`."""
        self.ask(DATA_ENDED)
        if self._together is not None and not self._together.is_over(step, wait=True):
            raise MismatchError(
                f"the data of process {self._together.group.index} end after step {step}, and others have begun a "
                "later one; all processes need the same number of batches"
            )

    def catch_up(self, step: Callable[[], int], take: Callable[[], None]) -> None:
        """Leave the loop: whoever does so before the other processes has to go on to where they are."""
        if self._together is not None:
            self.ask("the loop was left")
            while not self._together.is_over(step(), wait=True):
                take()
            self.hear(step())
