"""Files that are written whole or not at all."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Put a file in place at once: whoever reads it finds the old one or the new one, even after a crash."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the disk, not only the system, know a file or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_files(directory: Path) -> dict[str, int]:
    """The size of every file under a directory, by its path in it."""
    found: dict[str, int] = {}
    for root, _, names in os.walk(directory):
        for name in names:
            path = Path(root, name)
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                found[path.relative_to(directory).as_posix()] = path.lstat().st_size
    return found
