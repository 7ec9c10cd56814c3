"""Triggers: after which steps a hook is called; and the schedule of all hooks of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


@dataclass(frozen=True)
class Trigger:
    """Decides after which steps a hook is due. Immutable: several hooks may share one.

    `fired` is the step at which it was due last, or None.
    """

    @property
    def patience(self) -> float:
        """The seconds after which this is due at a step that `next` does not name."""
        return math.inf

    def counts_from(self, start: int) -> int | None:
        """Return the first value of `fired`, in a run that starts at step `start`."""
        return start

    def next(self, step: int, fired: int | None = None) -> float:
        """Return the first step after `step` at which this is due by count, or infinity."""
        del step, fired
        return math.inf

    def due(self, step: int, waited: float, fired: int | None = None) -> bool:
        """Return whether this is due after `step`, `waited` seconds after it was due last."""
        return self.next(step - 1, fired) == step or (waited >= self.patience and step != fired)


@dataclass(frozen=True)
class _Every(Trigger):
    steps: int | None
    secs: float | None

    @property
    def patience(self) -> float:
        return math.inf if self.secs is None else self.secs

    def next(self, step: int, fired: int | None = None) -> float:
        return math.inf if self.steps is None else (step // self.steps + 1) * self.steps


@dataclass(frozen=True)
class _Timer(_Every):
    at_once: bool

    def counts_from(self, start: int) -> int | None:
        return None if self.at_once else start

    def next(self, step: int, fired: int | None = None) -> float:
        if fired is None:
            return step + 1 if self.at_once else math.inf
        return math.inf if self.steps is None else max(step + 1, fired + self.steps)


@dataclass(frozen=True)
class _At(Trigger):
    steps: tuple[int, ...]

    def next(self, step: int, fired: int | None = None) -> float:
        return min((chosen for chosen in self.steps if chosen > step), default=math.inf)


@dataclass(frozen=True)
class _First(Trigger):
    count: int

    def next(self, step: int, fired: int | None = None) -> float:
        return step + 1 if step < self.count else math.inf


def every(*, steps: int | None = None, secs: float | None = None) -> Trigger:
    """At every multiple of `steps`, when `secs` seconds have passed since the last time, or both.

    It counts from step 0, not from the start of the run, so a resumed run fires at the same steps.
    """
    if steps is None and secs is None:
        raise ValueError("every() needs steps= or secs=")
    _check_positive("every", steps, secs)
    return _Every(steps, secs)


def timer(*, steps: int | None = None, secs: float | None = None, at_once: bool = True) -> Trigger:
    """After the first step of a run, and then `steps` or `secs` after it was due last.

    This is TensorFlow 1's timer, which counts from the start of a run; without `at_once` it is not
    due after the first step. Prefer `every`: an interrupted run then fires at the same steps.
    """
    if (steps is None) == (secs is None):
        raise ValueError("timer() needs either steps= or secs=")
    _check_positive("timer", steps, secs)
    return _Timer(steps, secs, at_once)


def at(*steps: int) -> Trigger:
    """After each of these steps."""
    if not steps or any(not isinstance(step, int) or step < 1 for step in steps):
        raise ValueError(f"at() needs steps that are whole numbers >= 1, got {list(steps)}")
    return _At(tuple(sorted(steps)))


def first(count: int) -> Trigger:
    """After each of the first `count` steps."""
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"first() needs a whole number >= 1, got {count}")
    return _First(count)


def never() -> Trigger:
    """After no step."""
    return Trigger()


def _check_positive(name: str, steps: int | None, secs: float | None) -> None:
    for what, value in (("steps", steps), ("secs", secs)):
        if value is not None and value <= 0:
            raise ValueError(f"{name}() needs {what} > 0, got {value}")
    if steps is not None and not isinstance(steps, int):
        raise ValueError(f"{name}() needs a whole number of steps, got {steps}")


class _Scheduled(Protocol):
    when: Trigger


H = TypeVar("H", bound=_Scheduled)


class HookSchedule(Generic[H]):
    """Which hooks are due after a step, and when the next one is due."""

    def __init__(self, hooks: Sequence[H]):
        self.next_step = 0.0  # the next step at which a hook is due by count
        self.next_time = 0.0  # the next time at which a hook is due by seconds
        self._hooks = hooks
        self._fired: list[int | None] = []  # the step at which each hook was due last
        self._times: list[float] = []  # and the time
        self.start(0, 0.0)

    def start(self, step: int, now: float) -> None:
        """Start or restart after `step`."""
        self._fired = [hook.when.counts_from(step) for hook in self._hooks]
        self._times = [now] * len(self._hooks)
        self.look_ahead(step)

    def due(self, step: int, now: float) -> list[H]:
        """Return the hooks that are due after `step`."""
        if step < self.next_step and now < self.next_time:
            return []
        due: list[H] = []
        for i, hook in enumerate(self._hooks):
            if hook.when.due(step, now - self._times[i], self._fired[i]):
                due.append(hook)
                self._fired[i] = step
                self._times[i] = now
        self.look_ahead(step)
        return due

    def look_ahead(self, step: int) -> None:
        """Compute when a hook is due next after `step`, so that no step before has to check."""
        self.next_step = math.inf
        self.next_time = math.inf
        for hook, fired, time in zip(self._hooks, self._fired, self._times, strict=True):
            self.next_step = min(self.next_step, hook.when.next(step, fired))
            self.next_time = min(self.next_time, time + hook.when.patience)
