"""When a group of processes is worth a restart."""

from typing import NamedTuple

from ftrain.launching.diagnosis import Failure

MAX_IDLE_ATTEMPTS = 5  # in a row without progress
MAX_IDLE_HANGS = 2  # of them, because each costs the whole timeout
MAX_DELAY = 30.0  # seconds


class Restart(NamedTuple):
    """Restart after a delay."""

    delay: float  # seconds


class GiveUp(NamedTuple):
    """End the job."""

    reason: str


class RestartPolicy:
    """Decides after each failure: restart while that leads to new steps, and a few times without.

    After an error without progress it gives up, unless the process reported a transient error (exit
    code 74). After a kill any steps count as progress, even if an earlier attempt has taken them:
    the process did not fail by itself.
    """

    def __init__(self, max_restarts: int):
        self.max_restarts = max_restarts
        self.restarts = 0
        self.max_step = 0  # of all attempts
        self._idle = 0  # attempts since the last progress
        self._idle_hangs = 0
        self._idle_restarts = 0

    def decide(self, failure: Failure, reached: int | None) -> Restart | GiveUp:
        """Decide what to do after an attempt that reached a step and failed."""
        progressed = (reached or 0) > self.max_step
        self.max_step = max(self.max_step, reached or 0)
        if progressed or (reached and failure.kind in ("signal", "peer")):
            self._idle = self._idle_hangs = self._idle_restarts = 0
        else:
            self._idle += 1
            self._idle_hangs += failure.kind == "hang"
        reason = self._objection(failure, progressed)
        if reason is not None:
            return GiveUp(reason)
        delay = min(MAX_DELAY, 2.0 ** (self._idle_restarts - 1)) if self._idle_restarts else 0.0
        self.restarts += 1
        self._idle_restarts += 1
        return Restart(delay)

    def _objection(self, failure: Failure, progressed: bool) -> str | None:
        beyond = f"beyond step {self.max_step:,}" if self.max_step else "to a first step"
        if failure.kind == "mistake":
            return "a restart would not help"
        if failure.kind == "error" and not progressed:
            return f"it did not get {beyond}, so a restart would only repeat it"
        if self._idle_hangs >= MAX_IDLE_HANGS:
            return f"it hung {self._idle_hangs} more times and did not get {beyond}"
        if self._idle >= MAX_IDLE_ATTEMPTS:
            return f"{self._idle} attempts in a row made no progress"
        if self.restarts >= self.max_restarts:
            used_up = f"its {self.max_restarts} restarts are used up"
            return used_up if self.max_restarts else "restarts are disabled"
        return None
