"""The supervisor: starts a group of processes, watches it, and restarts it when it fails.

It never touches a device.
"""

import select
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from ftrain.launching.child_environment import child_environments, open_lifeline
from ftrain.launching.child_processes import ChildGroup, ProcessStatus
from ftrain.launching.failures import (
    Failure,
    GiveUp,
    RestartPolicy,
    find_cause,
    find_hang,
    find_overdue,
)
from ftrain.launching.outcome import (
    FailureRecord,
    History,
    Outcome,
    count,
    outcome_of_stop,
    outcome_of_success,
)
from ftrain.launching.output import Screen
from ftrain.launching.signals import StopRequests, open_mailbox

_PATIENCE = 10.0  # seconds after a stop request until a line names the processes that still run
_POLL = 0.02  # seconds; the exit of a silent process is noticed in that time


@dataclass(frozen=True)
class LaunchSpec:
    """What to run, and how to handle failures."""

    command: tuple[str, ...]
    processes: int
    processes_after_failure: int | None = None  # None: the same number
    max_restarts: int = 10
    hang_timeout: float = 300.0  # seconds
    inject: str | None = None
    gpus_each: int | None = None  # None: leave the choice to the processes
    host: str = "127.0.0.1"


def supervise(spec: LaunchSpec, screen: Screen) -> int:
    """Run a job to its end, with restarts, and return the exit code."""
    started = time.monotonic()
    with open_mailbox() as mailbox, open_lifeline() as lifeline:
        supervisor = _Supervisor(spec, screen, StopRequests(mailbox), lifeline)
        outcome = supervisor.run()
    screen.set_status("")
    for failure in supervisor.history.failures:
        screen.log(failure.describe())
    screen.log(f"{outcome.text} in {time.monotonic() - started:.1f} s")
    return outcome.code


class _Supervisor:
    def __init__(self, spec: LaunchSpec, screen: Screen, requests: StopRequests, lifeline: int):
        self._spec = spec
        self._screen = screen
        self._requests = requests
        self._lifeline = lifeline
        self._policy = RestartPolicy(spec.max_restarts)
        self._processes = spec.processes
        self.history = History()

    def run(self) -> Outcome:
        """Run one attempt after the other, until the job has an outcome."""
        while True:
            outcome = self._run_attempt()
            if outcome is not None:
                return outcome

    def _run_attempt(self) -> Outcome | None:
        attempt = self._run_group()
        failure = attempt.failure()
        if failure is None:
            return outcome_of_success(attempt.statuses, self.history, self._requests)
        outcome = outcome_of_stop(attempt.statuses, failure, self.history, self._requests)
        if outcome is not None and not outcome.failed:
            return outcome
        record = FailureRecord(
            time.strftime("%Y-%m-%d %H:%M:%S"),
            failure.description,
            attempt.noticed_at or time.monotonic(),
        )
        self.history.failures.append(record)
        if outcome is not None:
            return outcome
        decision = self._policy.decide(failure, attempt.reached)
        if isinstance(decision, GiveUp):
            code = attempt.statuses[failure.process].exit_code
            return Outcome(f"gave up: {decision.reason};", code)
        return self._restart(record, decision.delay)

    def _run_group(self) -> "Attempt":
        environments = child_environments(
            self._processes,
            host=self._spec.host,
            hang_timeout=self._spec.hang_timeout,
            attempt=self._policy.restarts,
            inject=self._spec.inject,
            gpus=self._spec.gpus_each,
            after_failure=self._spec.processes_after_failure,
        )
        group = ChildGroup(
            self._spec.command,
            environments,
            lifeline=self._lifeline,
            screen=self._screen,
            mailbox=self._requests.mailbox,
        )
        with closing(group):
            attempt = Attempt(group, self._requests, self._spec.hang_timeout, self._screen.log)
            while attempt.poll():
                self._show_progress(attempt)
        self._show_progress(attempt)
        return attempt

    def _show_progress(self, attempt: "Attempt") -> None:
        self.history.update(attempt.statuses, time.monotonic())
        self._screen.set_status(self.history.describe_status(attempt.running))

    def _restart(self, record: FailureRecord, delay: float) -> Outcome | None:
        """Log the restart and wait; return None if the next attempt may start then."""
        record.restarted = True
        self._processes = self._spec.processes_after_failure or self._spec.processes
        size = f" with {self._processes}" if self._processes != self._spec.processes else ""
        number = f"restart {self._policy.restarts} of {self._spec.max_restarts}"
        later = f" in {delay:g} s" if delay else ""
        self._screen.log(f"{record.description}; {number}{size}{later}")
        self._screen.set_status("restarting")
        self._wait(delay)
        requested = self._requests.first
        return None if requested is None else Outcome(self.history.describe_stop(requested.name), 0)

    def _wait(self, delay: float) -> None:
        deadline = time.monotonic() + delay
        self._requests.update()
        while self._requests.first is None and (rest := deadline - time.monotonic()) > 0:
            select.select([self._requests.mailbox], [], [], rest)
            self._requests.update()


class Attempt:
    """One run of a group, from its start until the last process has exited.

    After the first process that fails or hangs, it ends the others. A signal stops all of them.
    """

    def __init__(
        self,
        group: ChildGroup,
        requests: StopRequests,
        hang_timeout: float,
        log: Callable[[str], None],
    ):
        self._group = group
        self._requests = requests
        self._hang_timeout = hang_timeout
        self._log = log
        self._asked = False  # True once the processes know of the first request to stop
        self._killed = False  # True once the second request has killed them
        self._asked_at: float | None = None  # None again once a line has named the slow ones
        self._hang: Failure | None = None
        self.noticed_at: float | None = None  # the first failure

    @property
    def statuses(self) -> list[ProcessStatus]:
        """The status of each process, in order."""
        return self._group.statuses

    @property
    def running(self) -> int:
        """The number of processes that have not exited."""
        return self._group.running

    @property
    def reached(self) -> int | None:
        """The highest step that a process has taken; None if none has taken any."""
        moved = (
            status.max_step
            for status in self.statuses
            if status.first_step is not None and status.max_step > status.first_step
        )
        return max(moved, default=None)

    def poll(self) -> bool:
        """Wait a little and handle what has happened; False once all processes have exited."""
        self._group.poll(_POLL)
        self._handle_requests()
        if self.noticed_at is None:
            self._look_for_failure()
        return self._group.running > 0

    def failure(self) -> Failure | None:
        """Return why it failed, once all processes have exited; None if it succeeded."""
        if not any(status.has_failed for status in self.statuses):
            return None
        explained = any(
            status.reported_own_failure and status.has_failed for status in self.statuses
        )
        return self._hang if self._hang is not None and not explained else find_cause(self.statuses)

    def _handle_requests(self) -> None:
        self._requests.update()
        first = self._requests.first
        second = self._requests.second
        if second is not None and not self._killed:
            self._asked = True
            self._killed = True
            self._log(f"{second.name}: ending {count(self.running, 'process')} at once")
            self._group.kill()
        elif first is not None and not self._asked:
            self._asked = True
            processes = count(self.running, "process")
            self._log(
                f"{first.name}: asking {processes} to save and stop; send it again to stop at once"
            )
            self._group.request_stop()
            self._asked_at = time.monotonic()
        elif (
            self._asked_at is not None
            and time.monotonic() - self._asked_at > _PATIENCE
            and self.running
        ):
            self._asked_at = None
            self._log(
                f"still waiting for {self._describe_running()}; send it again to stop at once"
            )

    def _look_for_failure(self) -> None:
        now = time.monotonic()
        failed = [status for status in self.statuses if status.has_failed]
        overdue = find_overdue(self.statuses, now, self._hang_timeout)
        if not failed and not overdue:
            return
        self.noticed_at = now
        hanging = {status.index for status in overdue}
        if all(status.hung for status in failed):  # also if none has failed
            halted = self._group.halted()
            self._hang = find_hang(self.statuses, now, halted)
            culprit = self._hang.process
            is_certain = culprit in halted or self.statuses[culprit].busy is not None
            # Only the stacks of the culprit matter: the others wait for it. A halted process has
            # none to show.
            hanging = ({culprit} if is_certain else {*hanging, culprit}) - halted
        self._group.end(hanging)

    def _describe_running(self) -> str:
        halted = self._group.halted()
        names = [
            f"{each.index}{' (stopped by a signal)' * (each.index in halted)}"
            for each in self.statuses
            if each.running
        ]
        return f"process{'es' * (len(names) > 1)} {', '.join(names)}"
