"""Triggers: which steps a hook wants to see."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Trigger:
    """Says of each step whether a hook is due after it. Immutable: one trigger may serve many hooks.

    `fired` is the step at which it was due last, as far as it cares.
    """

    @property
    def patience(self) -> float:
        """The seconds after which this is due at a step that `next` does not tell."""
        return math.inf

    def counts_from(self, start: int) -> int | None:
        """What `fired` is before it was ever due, in a run that starts at step `start`."""
        return start

    def next(self, step: int, fired: int | None = None) -> float:
        """The first step after `step` at which this is due by count, or infinity."""
        del step, fired
        return math.inf

    def due(self, step: int, waited: float, fired: int | None = None) -> bool:
        """Whether this is due after `step`, `waited` seconds after it was due last."""
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
    """At every multiple of `steps`, or whenever `secs` seconds have passed since the last time, or both.

    Multiples of the step, not of the steps since the start: a resumed run fires where the first one would have.
    """
    if steps is None and secs is None:
        raise ValueError("every() needs steps= or secs=")
    _check_positive("every", steps, secs)
    return _Every(steps, secs)


def timer(*, steps: int | None = None, secs: float | None = None, at_once: bool = True) -> Trigger:
    """After the first step of a run, and then so many steps or seconds after it was due last.

    This is the timer of the reference, which counts from wherever a run starts; without `at_once` it passes over the
    first step. Prefer `every`: with it a run that is interrupted writes and saves at the same steps as one that is not.
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
