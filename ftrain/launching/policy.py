"""When a group of processes is worth a restart."""

from typing import NamedTuple

from ftrain.launching.diagnosis import Failure

MOST_IDLE_ATTEMPTS = 5  # in a row, that lead to nothing
MOST_IDLE_HANGS = 2  # of them, that hang: each costs the whole timeout
LONGEST_DELAY = 30.0  # seconds


class Restart(NamedTuple):
    delay: float  # seconds


class GiveUp(NamedTuple):
    reason: str


class RestartPolicy:
    """Decides after each failure. It restarts as long as that leads to new steps, and a few times when it does not.

    After an error that led to no new step it gives up, unless the process said that the error may pass (exit code 74).
    After a kill any steps count, also those that were taken before: the process did not fail by itself.
    """

    def __init__(self, max_restarts: int):
        self.max_restarts = max_restarts
        self.restarts = 0
        self.furthest = 0  # the step that any attempt has reached
        self._idle = self._idle_hangs = 0  # attempts since the last one that led to something
        self._waited = 0  # restarts since then

    def decide(self, failure: Failure, reached: int | None) -> Restart | GiveUp:
        """What to do after an attempt that came to step `reached` and failed."""
        progressed = (reached or 0) > self.furthest
        self.furthest = max(self.furthest, reached or 0)
        if progressed or (reached and failure.nature in ("signal", "peer")):
            self._idle = self._idle_hangs = self._waited = 0
        else:
            self._idle += 1
            self._idle_hangs += failure.nature == "hang"
        reason = self._objection(failure, progressed)
        if reason is not None:
            return GiveUp(reason)
        delay = min(LONGEST_DELAY, 2.0 ** (self._waited - 1)) if self._waited else 0.0
        self.restarts += 1
        self._waited += 1
        return Restart(delay)

    def _objection(self, failure: Failure, progressed: bool) -> str | None:
        beyond = f"beyond step {self.furthest:,}" if self.furthest else "to a first step"
        if failure.nature == "mistake":
            return "a restart would not help"
        if failure.nature == "error" and not progressed:
            return f"it did not get {beyond}, so a restart would only repeat it"
        if self._idle_hangs >= MOST_IDLE_HANGS:
            return f"it hung {self._idle_hangs} times more and did not get {beyond}"
        if self._idle >= MOST_IDLE_ATTEMPTS:
            return f"{self._idle} attempts in a row led no further"
        if self.restarts >= self.max_restarts:
            return (
                f"its {self.max_restarts} restarts are used up"
                if self.max_restarts
                else "it may not restart"
            )
        return None
