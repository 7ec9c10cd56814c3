"""What happened in a job, and how to tell it in a few lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ftrain.launching.account import Account


@dataclass
class Setback:
    """A failure, and what became of it."""

    when: str
    story: str
    noticed_at: float
    restarted: bool = False
    resumed_from: int | None = None  # the first step that was told
    seconds: float | None = None  # from the moment it was noticed to the first new step

    def describe(self) -> str:
        if not self.restarted:
            return f"{self.when}: {self.story}"
        went_on = (
            "but reached no new step"
            if self.seconds is None
            else f"restarted in {self.seconds:.1f} s"
        )
        return f"{self.when}: {self.story}; went on{self._origin()}, {went_on}"

    def _origin(self) -> str:
        if self.resumed_from is None:
            return ""
        return f" from step {self.resumed_from:,}" if self.resumed_from else " from the start"


@dataclass
class History:
    """A job over all of its attempts."""

    setbacks: list[Setback] = field(default_factory=list)
    step: int | None = None  # the furthest of the newest attempt
    steps: int | None = None
    loss: float | None = None

    @property
    def restarts(self) -> int:
        return sum(setback.restarted for setback in self.setbacks)

    def follow(self, accounts: Sequence[Account], now: float) -> None:
        """Take in how far the processes are."""
        leader = max(accounts, key=lambda account: -1 if account.step is None else account.step)
        self.step, self.loss = leader.step, leader.loss
        self.steps = leader.steps if leader.steps is not None else self.steps
        if self.setbacks and self.setbacks[-1].seconds is None:
            self._look_for_new_step(self.setbacks[-1], accounts, now)

    def describe_status(self, running: int) -> str:
        """How far the job is.

        >>> History(step=1200, steps=2000, loss=0.12345).describe_status(running=3)
        'step 1,200/2,000  loss 0.1235  3 processes'
        """
        shown = [f"step {self._position('/')}" if self.step is not None else "starting"]
        shown += [f"loss {self.loss:.4g}"] if self.loss is not None else []
        shown += [count(running, "process")]
        shown += [count(self.restarts, "restart")] if self.restarts else []
        return "  ".join(shown)

    def describe_done(self, processes: int) -> str:
        """What there is to say of a job that is done.

        >>> History(step=2000).describe_done(processes=3)
        'done: 2,000 steps on 3 processes'
        """
        steps = "" if self.step is None else f"{count(self.step, 'step')} on "
        return f"done: {steps}{count(processes, 'process')}"

    def describe_stop(self, signal: str) -> str:
        """What there is to say of a job that was asked to stop.

        >>> History(step=1200, steps=2000).describe_stop("SIGTERM")
        'stopped by SIGTERM at step 1,200 of 2,000'
        """
        where = (
            "before the first step" if self.step is None else f"at step {self._position(' of ')}"
        )
        return f"stopped by {signal} {where}"

    def _position(self, between: str) -> str:
        return f"{self.step:,}" + (f"{between}{self.steps:,}" if self.steps is not None else "")

    def _look_for_new_step(self, setback: Setback, accounts: Sequence[Account], now: float) -> None:
        told = [account.began for account in accounts if account.began is not None]
        if not told:
            return
        setback.resumed_from = (
            min(told) if setback.resumed_from is None else min(*told, setback.resumed_from)
        )
        if any(
            account.step is not None and account.step > setback.resumed_from for account in accounts
        ):
            setback.seconds = now - setback.noticed_at


def count(number: int, thing: str) -> str:
    """A number of things.

    >>> count(2, "process")
    '2 processes'
    """
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"
