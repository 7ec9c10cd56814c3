"""What stands here for a name of the reference."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Counterpart:
    ours: tuple[str, ...]  # what does its job, by dotted names
    note: str = ""


def to(*ours: str, note: str = "") -> Counterpart:
    return Counterpart(ours, note)
