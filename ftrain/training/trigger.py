"""Triggers: which steps a hook wants to see."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Trigger:
    """Says of each step whether a hook is due after it. Immutable: one trigger may serve many hooks."""

    @property
    def patience(self) -> float:
        """The seconds after which this is due at a step that `next` does not tell."""
        return math.inf

    def next(self, step: int) -> float:
        """The first step after `step` at which this is due by count, or infinity."""
        del step
        return math.inf

    def due(self, step: int, waited: float) -> bool:
        """Whether this is due after `step`, `waited` seconds after it was due last."""
        return self.next(step - 1) == step or waited >= self.patience


@dataclass(frozen=True)
class _Every(Trigger):
    steps: int | None
    secs: float | None

    @property
    def patience(self) -> float:
        return math.inf if self.secs is None else self.secs

    def next(self, step: int) -> float:
        return math.inf if self.steps is None else (step // self.steps + 1) * self.steps


@dataclass(frozen=True)
class _At(Trigger):
    steps: tuple[int, ...]

    def next(self, step: int) -> float:
        return min((chosen for chosen in self.steps if chosen > step), default=math.inf)


@dataclass(frozen=True)
class _First(Trigger):
    count: int

    def next(self, step: int) -> float:
        return step + 1 if step < self.count else math.inf


def every(*, steps: int | None = None, secs: float | None = None) -> Trigger:
    """At every multiple of `steps`, or whenever `secs` seconds have passed since the last time, or both.

    Multiples of the step, not of the steps since the start: a resumed run fires where the first one would have.
    """
    if steps is None and secs is None:
        raise ValueError("every() needs steps= or secs=")
    for name, value in (("steps", steps), ("secs", secs)):
        if value is not None and value <= 0:
            raise ValueError(f"every() needs {name} > 0, got {value}")
    return _Every(steps, secs)


def at(*steps: int) -> Trigger:
    """After each of these steps."""
    return _At(tuple(sorted(steps)))


def first(count: int) -> Trigger:
    """After each of the first `count` steps."""
    return _First(count)


def never() -> Trigger:
    """After no step."""
    return Trigger()
