"""Memory-mapped files, a limited number of them open at a time."""

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

MOST_OPEN = 128  # each holds a file descriptor


class MappedFiles:
    """Maps of files that must stay as they are; those not used for longest are let go. For use by several threads."""

    def __init__(self) -> None:
        self._maps: OrderedDict[Path, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    # Maps stay where they are: a copy in another process opens its own.
    def __reduce__(self) -> tuple:
        return MappedFiles, ()

    def get(self, path: Path, size: int, mtime_ns: int) -> mmap.mmap:
        """The map of a file that has this size and time. Who holds it may use it for as long as they like."""
        now = os.stat(path)
        # To touch what a mapped file has lost kills the process.
        if (now.st_size, now.st_mtime_ns) != (size, mtime_ns):
            raise ValueError(
                f"{path}: was changed while in use, it has {now.st_size} bytes and had {size} when it was indexed, or "
                "another time; open the files again"
            )
        with self._lock:
            found = self._maps.get(path) or _map(path)
            self._maps[path] = found
            self._maps.move_to_end(path)
            while len(self._maps) > MOST_OPEN:
                self._maps.popitem(last=False)  # not closed: another thread may be reading it
        return found


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
