"""The files of a directory."""

import contextlib
import os
from pathlib import Path


def list_files(directory: Path) -> dict[str, int]:
    """The size of every file under a directory, by its path in it."""
    found: dict[str, int] = {}
    for root, _, names in os.walk(directory):
        for name in names:
            path = Path(root, name)
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                found[path.relative_to(directory).as_posix()] = path.lstat().st_size
    return found
