"""Counterpart: what replaces a name of TensorFlow 1."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Counterpart:
    """The names in ftrain that replace a name of TensorFlow 1, and how they differ."""

    ours: tuple[str, ...]  # dotted names
    note: str = ""


def to(*ours: str, note: str = "") -> Counterpart:
    """Make a counterpart; short, for the tables."""
    return Counterpart(ours, note)
