"""Files that are written whole or not at all, and read whole up to a limit."""

import os
import stat
from pathlib import Path


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Read a regular file; ValueError if it is a pipe or a device, which may never end, or above `max_bytes`."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"it is not a regular file, expected one of at most {max_bytes} bytes")
    size = os.path.getsize(path)
    if size > max_bytes:
        raise ValueError(f"it has {size} bytes, expected at most {max_bytes}")
    with open(path, "rb") as file:
        contents = file.read(size + 1)  # takes as much memory as is asked for, before it reads
    if len(contents) > size:
        raise ValueError(f"it grew beyond its {size} bytes while it was read")
    return contents


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
