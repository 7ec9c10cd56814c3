"""Calls in flight: dispatched to the device, and settled in order when they are finished."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ftrain.data import Piece
from ftrain.training.hook import Hook
from ftrain.training.metrics import Metrics
from ftrain.training.objective import Batch
from ftrain.training.timing import Timing, clock

IN_FLIGHT = 8  # calls dispatched but not finished; without a bound, virtual devices deadlock and memory grows
FUSED_IN_FLIGHT = 2  # of calls that take several steps: one that runs, one that waits
QUICK = 0.03  # seconds that hooks may be told later, so that more calls are settled at a time


class Call(NamedTuple):
    """A call that the device is at work on, or about to be."""

    metrics: Metrics
    piece: Piece
    due: list[Hook]  # after its last step


class Flight:
    """The calls in flight. `tell` is called with each of them, in order, when it is finished.

    `now` is the time that they are stamped with then. Speed is measured between two finished calls: several are
    dispatched at once, and then none until the device is done with one of them.
    """

    def __init__(self, tell: Callable[[Call], None], timing: Timing, now: Callable[[], float]):
        self._tell, self._timing, self._now = tell, timing, now
        self._calls: deque[Call] = deque()
        self._settling: Call | None = None  # the one that is waited for, or told of
        self.suspect: int | None = None  # the first step of the call that is waited for

    def add(self, call: Call) -> None:
        """A call was dispatched: wait until there is room for another, or for all of them if a hook needs its state."""
        self._calls.append(call)
        if any(hook.needs_state for hook in call.due):
            return self.settle()
        most = IN_FLIGHT if call.piece.count == 1 else FUSED_IN_FLIGHT
        return self._settle(most, wanted=most // 2 if len(self._calls) > most else most)

    def settle(self) -> None:
        """Wait until all calls are finished and told of."""
        self._settle(0, 0)

    def clear(self) -> None:
        """Forget all calls: the run begins anew."""
        self._calls.clear()
        self._settling = self.suspect = None

    def batch_of(self, step: int) -> Batch | None:
        """The batch that a step was given, if its call is still here."""
        settling = [] if self._settling is None else [self._settling]
        for call in (*settling, *self._calls):
            if call.metrics.first <= step <= call.metrics.last:
                return call.piece.split()[step - call.metrics.first].batch
        return None

    def _settle(self, most: int, wanted: int) -> None:
        """Settle what is finished, until at most so many are left; to wake up less often, until so few as `wanted`,
        if that does not take long."""
        entered = clock()
        while self._calls and (
            len(self._calls) > most
            or self._calls[0].metrics.is_ready()
            or (len(self._calls) > wanted and clock() - entered < QUICK)
        ):
            self._settling = call = self._calls.popleft()
            started = clock()
            self.suspect = call.metrics.first
            call.metrics.wait()
            self.suspect = None
            call.metrics.time = self._now()
            self._timing.device += clock() - started
            self._tell(call)
