"""Stopping: whether a run stops, why, and at which step if several processes train."""

import threading
from collections.abc import Callable

from ftrain.cluster import MismatchError
from ftrain.coordination import Coordinator
from ftrain.training.consensus import Consensus

DATA_ENDED = "the data ended"  # a reason to stop


class Stopping:
    """Requests to stop, from any thread; the first reason is kept.

    With several processes a request is a proposal: all of them agree on the last step.
    """

    def __init__(self, coordinator: Coordinator, consensus: Consensus | None):
        self.reason: str | None = None
        self.interrupted = False
        self.thread: int | None = None  # the thread that takes the steps
        self._is_final = False  # that thread saw the request: no further step may be taken
        self._coordinator = coordinator
        self._consensus = consensus

    def ask(self, reason: str, *, interrupted: bool = False) -> None:
        """Request a stop; `interrupted` if it should be soon."""
        if self._consensus is not None:
            return self._consensus.ask_to_stop(reason, interrupted=interrupted)
        self.interrupted = self.interrupted or interrupted
        self.reason = self.reason or reason
        if threading.get_ident() == self.thread:  # another thread may ask just before a step
            self._is_final = True
        return None

    def is_due(self, step: int) -> bool:
        """Whether `step` was the last one; if so, no further step may be taken."""
        if self._coordinator.should_stop():
            self.ask("a thread asked to")
        self.hear(step)
        self._is_final = self.reason is not None
        return self._is_final

    def hear(self, step: int) -> None:
        """Take over the decision of the processes, if `step` is the last one."""
        if self._consensus is not None and self._consensus.is_over(step, wait=True):
            self.interrupted = self._consensus.interrupted
            self.reason = self._consensus.reason

    def is_coming(self, step: int) -> bool:
        """Whether the data after `step` are no longer needed; called by the read-ahead thread."""
        is_over = self._consensus is not None and self._consensus.is_over(step)
        return self.interrupted or is_over or self._coordinator.should_stop()

    def check(self) -> None:
        """Raise an error if no further step may be taken."""
        if self._is_final:
            self._coordinator.raise_requested_exception()
            raise RuntimeError(f"the run has been stopped: {self.reason}")

    def revoke(self) -> None:
        """Withdraw a request: the run goes back, and the hook will ask again at the same step."""
        if self._is_final:
            self.reason = None
            self._is_final = False

    def end_data(self, step: int) -> None:
        """Stop because there are no data after `step`."""
        self.ask(DATA_ENDED)
        if self._consensus is not None and not self._consensus.is_over(step, wait=True):
            raise MismatchError(
                f"the data of process {self._consensus.group.index} end after step {step}, but others "
                "have started a later one; all processes need the same number of batches"
            )

    def catch_up(self, step: Callable[[], int], take: Callable[[], None]) -> None:
        """The loop was left: take the steps that the other processes have already begun."""
        if self._consensus is not None:
            self.ask("the loop was left")
            while not self._consensus.is_over(step(), wait=True):
                take()
            self.hear(step())
