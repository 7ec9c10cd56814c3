"""Retention: which checkpoints stay. Pure: what there is goes in, what must go comes out."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

NEWEST = "newest"  # among the newest
KEPT = "kept"  # for good: it was due by the step or the clock, or was not ours to delete
PASSED = "passed"  # neither; it stays only as long as it is pinned or among the best


@dataclasses.dataclass(frozen=True)
class Record:
    """A checkpoint, as the catalog of a directory knows it."""

    step: int
    time: float
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    role: Literal["newest", "kept", "passed"] = NEWEST
    pinned: bool = False


@dataclasses.dataclass(frozen=True)
class Retention:
    """The newest `keep`, and for good one every so many steps or hours, and the `best` by a metric."""

    keep: int | Literal["all"] = 3
    every_steps: int | None = None
    every_hours: float | None = None
    best: int = 0
    metric: str = "loss"
    mode: Literal["min", "max"] | None = None  # None: the smallest loss

    def __post_init__(self):
        if self.keep != "all" and (not isinstance(self.keep, int) or self.keep < 1):
            raise ValueError(f"keep must be a whole number >= 1, or 'all', got {self.keep!r}")
        if self.every_steps is not None and (
            not isinstance(self.every_steps, int) or self.every_steps < 1
        ):
            raise ValueError(
                f"keep_every_steps must be a whole number >= 1, got {self.every_steps!r}"
            )
        if self.every_hours is not None and not self.every_hours > 0:
            raise ValueError(f"keep_every_hours must be > 0, got {self.every_hours}")
        if not isinstance(self.best, int) or self.best < 0:
            raise ValueError(f"keep_best must be >= 0, got {self.best!r}")
        if not isinstance(self.metric, str):
            raise ValueError(f"best_metric must be a name, got {self.metric!r}")
        if self.mode not in ("min", "max", None):
            raise ValueError(f"best_mode must be 'min' or 'max', got {self.mode!r}")
        if self.best and self.mode is None and self.metric != "loss":
            raise ValueError(
                f"keep_best by {self.metric!r} needs best_mode, 'min' or 'max': which values are better?"
            )


def rotate(
    records: Sequence[Record], policy: Retention, keep_after: float
) -> tuple[list[Record], list[Record], float]:
    """The checkpoints that stay, those that go, and the time after which the next one is kept for good.

    `records` are in the order in which they were saved. One that is no longer among the newest is kept for good if its
    step is a multiple of `every_steps`, or if it was saved after `keep_after`, which then moves on by `every_hours`.
    """
    rotated = list(records)
    window = [n for n, record in enumerate(records) if record.role == NEWEST]
    for n in window[: max(0, len(window) - policy.keep)] if policy.keep != "all" else []:
        record = records[n]
        role = KEPT if policy.every_steps and record.step % policy.every_steps == 0 else PASSED
        if policy.every_hours and record.time > keep_after:
            role, keep_after = KEPT, max(keep_after + policy.every_hours * 3600, record.time)
        rotated[n] = dataclasses.replace(record, role=role)
    best = {record.step for record in best_of(rotated, policy, policy.best)}
    recent = {
        record.step for record in (rotated if policy.keep == "all" else rotated[-policy.keep :])
    }
    stays = [
        record.role != PASSED or record.pinned or record.step in best | recent for record in rotated
    ]
    leaving = [record for record, is_staying in zip(rotated, stays, strict=True) if not is_staying]
    return (
        [record for record, is_staying in zip(rotated, stays, strict=True) if is_staying],
        leaving,
        keep_after,
    )


def best_of(records: Sequence[Record], policy: Retention, count: int) -> list[Record]:
    """The `count` best by the metric, the best of all first; of equals, the newer."""
    sign = -1 if policy.mode == "max" else 1
    measured = [
        record
        for record in reversed(records)
        if math.isfinite(record.metrics.get(policy.metric, math.nan))
    ]
    return sorted(measured, key=lambda record: sign * record.metrics[policy.metric])[:count]
