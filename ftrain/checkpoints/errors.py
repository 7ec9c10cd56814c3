"""Errors of checkpoints."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

_SHOWN = 2  # files, and leaves, that a message names


class CheckpointError(ValueError):
    """A checkpoint is missing, or cannot be made or used."""


class DamagedError(CheckpointError):
    """The files of a checkpoint are not those that were written; `damage` lists what is wrong."""

    def __init__(self, path: Path, damage: Sequence[str]):
        self.path = path
        self.damage = list(damage)
        leaves = [each for each in damage if each.startswith("leaf ")]
        shown = [each for each in damage if each not in leaves][:_SHOWN] + leaves[:_SHOWN]
        shown += [f"and {len(damage) - len(shown)} more"] if len(shown) < len(damage) else []
        super().__init__(f"{path} is damaged: {'; '.join(shown)}")


class LeafMismatchError(CheckpointError):
    """The leaves of a checkpoint are not the expected ones.

    `differences` has one phrase for each leaf that differs.
    """

    def __init__(self, path: Path | str, differences: Sequence[str], way_out: str = ""):
        self.path = path
        self.differences = list(differences)
        hint = f"\n{way_out}" if way_out else ""
        super().__init__(f"{path} does not fit: {_join(self.differences)}{hint}")


class SaveError(CheckpointError):
    """A checkpoint could not be written; what was saved before is untouched."""


def summarize_error(error: Exception) -> str:
    """Return the message of an error in one line.

    tensorstore reports errors of the operating system at length; of those, only the system's own
    message is returned.
    """
    if code := re.search(r"os_error_code='(\d+)'", f"{error}"):
        return os.strerror(int(code[1]))
    if status := re.match(
        r"(NOT_FOUND|DATA_LOSS|FAILED_PRECONDITION|INVALID_ARGUMENT|OUT_OF_RANGE): ", f"{error}"
    ):
        return f"its data are {'missing' if status[1] == 'NOT_FOUND' else 'damaged'}"
    return f"{error}".strip().partition("\n")[0][:300] or type(error).__name__


def _join(phrases: Sequence[str]) -> str:
    """Join up to three phrases in one line, more in one line each."""
    return "; ".join(phrases) if len(phrases) <= 3 else "\n  " + "\n  ".join(phrases)
