"""Small files: written atomically, and read whole up to a limit."""

import os
import stat
from pathlib import Path


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Read a regular file; ValueError for pipes, devices and files above `max_bytes`."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"it is not a regular file, expected one of at most {max_bytes} bytes")
    size = os.path.getsize(path)
    if size > max_bytes:
        raise ValueError(f"it has {size} bytes, expected at most {max_bytes}")
    with open(path, "rb") as file:
        contents = file.read(size + 1)  # allocates this much before it reads
    if len(contents) > size:
        raise ValueError(f"it grew beyond its {size} bytes while it was read")
    return contents


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old or the new contents, even after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
