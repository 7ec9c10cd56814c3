"""The supervisor: starts a group of processes, watches it, and starts it again when it fails. It needs no device."""

import select
import time
from contextlib import closing
from dataclasses import dataclass

from ftrain.launching.attempt import Attempt
from ftrain.launching.ending import Ending, end_asked, end_well
from ftrain.launching.group import Group
from ftrain.launching.policy import GiveUp, RestartPolicy
from ftrain.launching.screen import Screen
from ftrain.launching.signals import StopRequests, open_mailbox
from ftrain.launching.starting import environments, open_lifeline
from ftrain.launching.summary import History, Setback


@dataclass(frozen=True)
class Job:
    """What is to be run, and how much trouble to take over it."""

    command: tuple[str, ...]
    processes: int
    processes_after_failure: int | None = None  # as many as before
    max_restarts: int = 10
    hang_timeout: float = 300.0  # seconds
    inject: str | None = None
    gpus_each: int | None = None  # leave it to the processes
    host: str = "127.0.0.1"


def supervise(job: Job, screen: Screen) -> int:
    """Run a job to its end. Answers the code to exit with."""
    started = time.monotonic()
    with open_mailbox() as mailbox, open_lifeline() as lifeline:
        supervisor = _Supervisor(job, screen, StopRequests(mailbox), lifeline)
        ending = supervisor.run()
    screen.set_status("")
    for setback in supervisor.history.setbacks:
        screen.say(setback.describe())
    screen.say(f"{ending.text} in {time.monotonic() - started:.1f} s")
    return ending.code


class _Supervisor:
    def __init__(self, job: Job, screen: Screen, requests: StopRequests, lifeline: int):
        self._job, self._screen, self._requests, self._lifeline = job, screen, requests, lifeline
        self._policy = RestartPolicy(job.max_restarts)
        self._processes = job.processes
        self.history = History()

    def run(self) -> Ending:
        """One attempt after the other, until there is no reason for the next."""
        while True:
            ending = self._try_once()
            if ending is not None:
                return ending

    def _try_once(self) -> Ending | None:
        attempt = self._run_group()
        failure = attempt.failure()
        if failure is None:
            return end_well(attempt.accounts, self.history, self._requests)
        ending = end_asked(attempt.accounts, failure, self.history, self._requests)
        if ending is not None and not ending.failed:
            return ending
        setback = Setback(
            time.strftime("%Y-%m-%d %H:%M:%S"),
            failure.story,
            attempt.noticed_at or time.monotonic(),
        )
        self.history.setbacks.append(setback)
        if ending is not None:
            return ending
        decision = self._policy.decide(failure, attempt.reached)
        if isinstance(decision, GiveUp):
            return Ending(
                f"gave up: {decision.reason};", attempt.accounts[failure.process].exit_code
            )
        return self._restart(setback, decision.delay)

    def _run_group(self) -> Attempt:
        mailbox = self._requests.mailbox
        surroundings = environments(
            self._processes,
            host=self._job.host,
            hang_timeout=self._job.hang_timeout,
            attempt=self._policy.restarts,
            inject=self._job.inject,
            gpus=self._job.gpus_each,
            after_failure=self._job.processes_after_failure,
        )
        group = Group(
            self._job.command,
            surroundings,
            lifeline=self._lifeline,
            screen=self._screen,
            mailbox=mailbox,
        )
        with closing(group):
            attempt = Attempt(group, self._requests, self._job.hang_timeout, self._screen.say)
            while attempt.look():
                self._follow(attempt)
        self._follow(attempt)
        return attempt

    def _follow(self, attempt: Attempt) -> None:
        self.history.follow(attempt.accounts, time.monotonic())
        self._screen.set_status(self.history.describe_status(attempt.running))

    def _restart(self, setback: Setback, delay: float) -> Ending | None:
        """Tell it, and let some time pass; None if the next attempt may begin then."""
        setback.restarted = True
        self._processes = self._job.processes_after_failure or self._job.processes
        size = f" with {self._processes}" if self._processes != self._job.processes else ""
        number = f"restart {self._policy.restarts} of {self._job.max_restarts}"
        later = f" in {delay:g} s" if delay else ""
        self._screen.say(f"{setback.story}; {number}{size}{later}")
        self._screen.set_status("restarting")
        self._wait(delay)
        asked = self._requests.asked
        return None if asked is None else Ending(self.history.describe_stop(asked.name), 0)

    def _wait(self, delay: float) -> None:
        deadline = time.monotonic() + delay
        self._requests.update()
        while self._requests.asked is None and (rest := deadline - time.monotonic()) > 0:
            select.select([self._requests.mailbox], [], [], rest)
            self._requests.update()
