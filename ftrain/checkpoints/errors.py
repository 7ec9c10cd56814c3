"""What can be wrong with a checkpoint."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

_SHOWN = 2  # files, and leaves, that a message names


class CheckpointError(ValueError):
    """A checkpoint that is not there, or cannot be made or used."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not those that were written; `damage` says of each what is wrong."""

    def __init__(self, path: Path, damage: Sequence[str]):
        self.path, self.damage = path, list(damage)
        leaves = [each for each in damage if each.startswith("leaf ")]
        shown = [each for each in damage if each not in leaves][:_SHOWN] + leaves[:_SHOWN]
        shown += [f"and {len(damage) - len(shown)} more"] if len(shown) < len(damage) else []
        super().__init__(f"{path} is damaged: {'; '.join(shown)}")


class MismatchError(CheckpointError):
    """A checkpoint of another tree than the one that is wanted; `differences` has one phrase for each leaf."""

    def __init__(self, path: Path | str, differences: Sequence[str], way_out: str = ""):
        self.path, self.differences = path, list(differences)
        super().__init__(
            f"{path} does not fit: {join(self.differences)}" + (f"\n{way_out}" if way_out else "")
        )


def join(phrases: Sequence[str]) -> str:
    """Phrases in one line if they are few, else one in each."""
    return "; ".join(phrases) if len(phrases) <= 3 else "\n  " + "\n  ".join(phrases)


def in_one_line(error: Exception) -> str:
    """What an error says, in short; of one of the system's that tensorstore tells at length, the system's own words."""
    if code := re.search(r"os_error_code='(\d+)'", f"{error}"):
        return os.strerror(int(code[1]))
    if status := re.match(
        r"(NOT_FOUND|DATA_LOSS|FAILED_PRECONDITION|INVALID_ARGUMENT|OUT_OF_RANGE): ", f"{error}"
    ):
        return f"its data are {'missing' if status[1] == 'NOT_FOUND' else 'damaged'}"
    return f"{error}".strip().partition("\n")[0][:300] or type(error).__name__


class SaveError(CheckpointError):
    """A checkpoint that could not be written; what was saved before is untouched."""
