"""Failures of a group: which process failed first, or hangs, and whether a restart may help."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ftrain.launching.child_processes import ProcessStatus
from ftrain.launching.protocol import TRANSIENT, USER_ERROR

MAX_IDLE_ATTEMPTS = 5  # in a row without progress
MAX_IDLE_HANGS = 2  # of them, because each costs the whole timeout
MAX_DELAY = 30.0  # seconds before a restart
# Signals that another program sends; a process sends the others to itself, as by a crash.
_EXTERNAL_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_EXIT_SECONDS = 1.0  # how long after its failure the exit of a process may be seen
_MAX_REASON = 300  # characters
FailureKind = Literal["mistake", "error", "transient", "signal", "hang", "peer"]


@dataclass(frozen=True)
class Failure:
    """Why a group ended: the process at fault, the kind of failure, and a sentence about it."""

    process: int
    kind: FailureKind  # a restart repeats a mistake, but perhaps not a transient error
    description: str


def find_overdue(
    statuses: Sequence[ProcessStatus], now: float, timeout: float
) -> list[ProcessStatus]:
    """Return the processes that hang: those without a sign of life for `timeout` seconds.

    A process that is done may wait for the others before it exits. It counts as hanging only if the
    others show no sign of life either.
    """
    newest = max(
        (status.alive_at if status.running else status.ended_at or 0.0) for status in statuses
    )
    return [
        status
        for status in statuses
        if status.running
        and now - (max(newest, status.alive_at) if status.done else status.alive_at) > timeout
    ]


def find_hang(
    statuses: Sequence[ProcessStatus], now: float, halted: Collection[int] = ()
) -> Failure:
    """Return the process that the others wait for, when some hang.

    A process `halted` by a signal is certain. Otherwise it is a process that is busy with other
    work than a step, such as a hook. Otherwise it is the one with the lowest step and, among
    equals, with the oldest sign of life.
    """
    candidates = [status for status in statuses if status.running or status.hung]
    suspects = [status for status in candidates if not status.done] or candidates
    behind = min(
        suspects,
        key=lambda status: (
            status.index not in halted,
            status.busy is None,
            _step(status),
            status.alive_at,
        ),
    )
    others = [status for status in suspects if status is not behind]
    evidence = f"no sign of life for {now - behind.alive_at:.1f} s"
    if behind.index in halted:
        evidence = f"it is stopped by a signal, {evidence}"
    elif behind.busy is not None:
        evidence += f", in {behind.busy}"
    elif others and all(_step(status) > _step(behind) for status in others):
        evidence += ", its step is the lowest"
    elif others:
        evidence += ", the longest of those with the lowest step"
    description = f"process {behind.index} hung {_where(behind)} ({evidence})"
    return Failure(behind.index, "hang", description)


def find_cause(statuses: Sequence[ProcessStatus]) -> Failure:
    """Return the first failure of a group whose processes have all exited."""
    own = [status for status in statuses if status.has_own_failure]
    if own:
        return _explain(min(own, key=_failed_at))
    failed = [status for status in statuses if status.has_failed]
    witness = min(failed, key=lambda status: (status.terminated, status.ended_at or 0.0))
    blamed = witness.failure.because if witness.failure is not None else None
    if blamed is None or blamed >= len(statuses):
        description = (
            f"process {witness.index} lost another process {_where(witness)}{_reason(witness)}"
        )
        return Failure(witness.index, "peer", description)
    description = (
        f"process {witness.index} lost process {blamed} {_where(witness)}{_reason(witness)}"
    )
    return Failure(blamed, "peer", description)


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
            self._idle = 0
            self._idle_hangs = 0
            self._idle_restarts = 0
        else:
            self._idle += 1
            self._idle_hangs += failure.kind == "hang"
        reason = self._reason_to_give_up(failure, progressed)
        if reason is not None:
            return GiveUp(reason)
        delay = min(MAX_DELAY, 2.0 ** (self._idle_restarts - 1)) if self._idle_restarts else 0.0
        self.restarts += 1
        self._idle_restarts += 1
        return Restart(delay)

    def _reason_to_give_up(self, failure: Failure, progressed: bool) -> str | None:
        beyond = f"beyond step {self.max_step:,}" if self.max_step else "to a first step"
        if failure.kind == "mistake":
            return "a restart would not help"
        if failure.kind == "error" and not progressed:
            return f"it did not get {beyond}, so a restart would repeat it"
        if self._idle_hangs >= MAX_IDLE_HANGS:
            return f"it hung {self._idle_hangs} more times and did not get {beyond}"
        if self._idle >= MAX_IDLE_ATTEMPTS:
            return f"{self._idle} attempts in a row made no progress"
        if self.restarts >= self.max_restarts:
            used_up = f"its {self.max_restarts} restarts are used up"
            return used_up if self.max_restarts else "restarts are disabled"
        return None


def _failed_at(status: ProcessStatus) -> float:
    """Estimate when a process failed.

    If a process dies without a message, the others may report that before the system has ended its
    last thread. An abort gets no such credit: it may be a reaction to the failure of another.
    """
    silent = status.failure is None and status.signal != "SIGABRT"
    return (status.ended_at or 0.0) - (_EXIT_SECONDS if silent else 0.0)


def _explain(status: ProcessStatus) -> Failure:
    name = f"process {status.index}"
    where = _where(status)
    reason = _reason(status)
    failed = f"{name} failed {where}{reason or f' with exit code {status.returncode}'}"
    if status.returncode == USER_ERROR or (status.failure is not None and not status.failure.retry):
        return Failure(status.index, "mistake", failed)
    if status.hung:
        return Failure(status.index, "hang", f"{name} hung {where}{reason}")
    if status.signal is not None and not reason:  # a reported reason says more than the signal
        verb = "killed" if status.signal in _EXTERNAL_SIGNALS else "ended"
        return Failure(status.index, "signal", f"{name} was {verb} by {status.signal} {where}")
    return Failure(status.index, "transient" if status.returncode == TRANSIENT else "error", failed)


def _step(status: ProcessStatus) -> int:
    return -1 if status.step is None else status.step


def _where(status: ProcessStatus) -> str:
    return "before its first step" if status.step is None else f"at step {status.step:,}"


def _reason(status: ProcessStatus) -> str:
    """Return the failure that a process reported, on one line."""
    if status.failure is None:
        return ""
    words = " ".join(status.failure.message.split())
    words = words if len(words) <= _MAX_REASON else f"{words[:_MAX_REASON]}..."
    return ": " + ": ".join(part for part in (status.failure.kind, words) if part)
