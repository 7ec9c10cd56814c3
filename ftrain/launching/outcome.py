"""The outcome of a job: its failures and restarts, its last line, and its exit code."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ftrain.launching.child_processes import ProcessStatus
from ftrain.launching.failures import Failure
from ftrain.launching.protocol import PEER_FAILED
from ftrain.launching.signals import StopRequests

_SIGNAL_BASE = 128  # added to the number of a signal for an exit code, as shells do


class Outcome(NamedTuple):
    """How a job ended: the line to print, and the code to exit with."""

    text: str
    code: int
    failed: bool = False  # True if the last attempt failed as well


@dataclass
class FailureRecord:
    """A failure of a job, and the restart after it."""

    when: str
    description: str
    noticed_at: float
    restarted: bool = False
    resumed_from: int | None = None  # the first step that was reported after the restart
    seconds: float | None = None  # from `noticed_at` to the first new step

    def describe(self) -> str:
        """Return one line for the summary at the end of a job."""
        if not self.restarted:
            return f"{self.when}: {self.description}"
        result = "but reached no new step"
        if self.seconds is not None:
            result = f"restarted in {self.seconds:.1f} s"
        return f"{self.when}: {self.description}; {self._origin()}, {result}"

    def _origin(self) -> str:
        if self.resumed_from is None:
            return "restarted"
        where = f"step {self.resumed_from:,}" if self.resumed_from else "the start"
        return f"resumed from {where}"


@dataclass
class History:
    """The progress of a job over all of its attempts."""

    failures: list[FailureRecord] = field(default_factory=list)
    step: int | None = None  # the highest of the current attempt
    steps: int | None = None
    loss: float | None = None

    @property
    def restarts(self) -> int:
        """The number of restarts so far."""
        return sum(failure.restarted for failure in self.failures)

    def update(self, statuses: Sequence[ProcessStatus], now: float) -> None:
        """Record how far the processes are."""
        leader = max(statuses, key=lambda status: -1 if status.step is None else status.step)
        self.step = leader.step
        self.loss = leader.loss
        self.steps = leader.steps if leader.steps is not None else self.steps
        if self.failures and self.failures[-1].seconds is None:
            self._look_for_new_step(self.failures[-1], statuses, now)

    def describe_status(self, running: int) -> str:
        """Return the line of status.

        >>> History(step=1200, steps=2000, loss=0.12345).describe_status(running=3)
        'step 1,200/2,000  loss 0.1235  3 processes'
        """
        shown = [f"step {self._position('/')}" if self.step is not None else "starting"]
        shown += [f"loss {self.loss:.4g}"] if self.loss is not None else []
        shown += [count(running, "process")]
        shown += [count(self.restarts, "restart")] if self.restarts else []
        return "  ".join(shown)

    def describe_done(self, processes: int) -> str:
        """Return the last line of a job that is done.

        >>> History(step=2000).describe_done(processes=3)
        'done: 2,000 steps on 3 processes'
        """
        steps = "" if self.step is None else f"{count(self.step, 'step')} on "
        return f"done: {steps}{count(processes, 'process')}"

    def describe_stop(self, signal: str) -> str:
        """Return the last line of a job that was stopped by a signal.

        >>> History(step=1200, steps=2000).describe_stop("SIGTERM")
        'stopped by SIGTERM at step 1,200 of 2,000'
        """
        if self.step is None:
            return f"stopped by {signal} before the first step"
        return f"stopped by {signal} at step {self._position(' of ')}"

    def _position(self, between: str) -> str:
        return f"{self.step:,}" + (f"{between}{self.steps:,}" if self.steps is not None else "")

    def _look_for_new_step(
        self, failure: FailureRecord, statuses: Sequence[ProcessStatus], now: float
    ) -> None:
        first = [status.first_step for status in statuses if status.first_step is not None]
        if not first:
            return
        if failure.resumed_from is not None:
            first.append(failure.resumed_from)
        failure.resumed_from = min(first)
        steps = [status.step for status in statuses if status.step is not None]
        if any(step > failure.resumed_from for step in steps):
            failure.seconds = now - failure.noticed_at


def outcome_of_success(
    statuses: Sequence[ProcessStatus], history: History, requests: StopRequests
) -> Outcome:
    """Return the outcome after every process has exited with 0: done, or stopped."""
    reported = next((each.stop_signal for each in statuses if each.stop_signal is not None), None)
    requested = requests.first.name if requests.first is not None else None
    all_done = all(status.done for status in statuses)
    if reported is None and (requested is None or all_done):
        return Outcome(history.describe_done(len(statuses)), 0)
    return Outcome(history.describe_stop(requested or reported or ""), 0)


def outcome_of_stop(
    statuses: Sequence[ProcessStatus], failure: Failure, history: History, requests: StopRequests
) -> Outcome | None:
    """Return the outcome after an attempt that failed while it was stopped; None if it was not."""
    if requests.first is None:
        return None
    stopped = history.describe_stop(requests.first.name)
    if requests.second is not None:
        return Outcome(f"{stopped}, at once by a second signal", _SIGNAL_BASE + requests.second)
    if _were_ended_by_request(statuses):
        unsaved = count(sum(status.has_failed for status in statuses), "process")
        return Outcome(f"{stopped}: {unsaved} ended without saving", _SIGNAL_BASE + requests.first)
    return Outcome(
        f"{stopped}, but with a failure", statuses[failure.process].exit_code, failed=True
    )


def count(number: int, thing: str) -> str:
    """Return a number with its noun.

    >>> count(2, "process")
    '2 processes'
    """
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"


def _were_ended_by_request(statuses: Sequence[ProcessStatus]) -> bool:
    """True if SIGTERM ended processes that did not handle it yet, and nothing else went wrong."""
    harmless = (0, -signal.SIGTERM, PEER_FAILED)
    return any(
        status.returncode == -signal.SIGTERM and not status.terminated for status in statuses
    ) and all(status.terminated or status.returncode in harmless for status in statuses)
