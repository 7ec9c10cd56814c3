"""Locks: one process, and one place in it, at work on a thing at a time."""

import fcntl
import os
from pathlib import Path
from typing import IO


class InUseError(RuntimeError):
    """Somebody else is at work here."""


def hold(path: Path, what: str) -> IO[str]:
    """Take a lock, until the answer is closed or this process ends; `what` begins the message if another holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open(path, "a+")  # noqa: SIM115 - it is held open for as long as the lock is
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise InUseError(f"{what} by process {holder}; wait for it, or choose another directory") from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def wait_for(path: Path) -> IO[str]:
    """Take a lock as soon as nobody else holds it, until the answer is closed or this process ends."""
    lock = open(path, "a+")  # noqa: SIM115 - it is held open for as long as the lock is
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def is_held(path: Path) -> bool:
    """Whether somebody holds a lock."""
    if not path.exists():
        return False
    with open(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
