"""The files of a directory."""

import contextlib
import os
from pathlib import Path


def list_files(directory: Path) -> dict[str, int]:
    """The size of every file under a directory, by its path in it; an error if a part of it cannot be listed."""
    found: dict[str, int] = {}
    for root, _, names in os.walk(directory, onerror=_raise):
        for name in names:
            path = Path(root, name)
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                found[path.relative_to(directory).as_posix()] = path.lstat().st_size
    return found


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # deleted since it was listed
        raise error
