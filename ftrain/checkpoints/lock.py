"""Locks: one process, and one place in it, at work on a thing at a time.

A lock is a file with an exclusive `flock`, which the system frees when its process ends. Two cases remain in which the
process is gone and the lock is not. A child that it forked has inherited the file: such a lock is taken over, if the
process ran on this machine and no longer does. And its machine is lost: a network file system then keeps the lock until
the lease of that machine ends. From here nobody can know whether the process is alive there, so such a lock is never
taken over; InUseError names the host, and says what to do.
"""

import fcntl
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from ftrain.storage import exists, io_timeout, retry

_TAKEOVER = (
    ".takeover"  # behind a lock's name: held for a moment by the process that takes a lock over
)
_LIMIT = (
    600.0  # seconds to wait for a lock that is held only while a checkpoint or a catalog is written
)
_POLL = 0.05
_HOLDER = re.compile(r"process (\d+) on host (\S+) started (\S+) boot (\S+) namespace (\S+)")


class InUseError(RuntimeError):
    """Another process is at work here, on this machine."""


class HeldElsewhereError(InUseError):
    """A process of another machine is at work here, or was when that machine was lost."""


class Holder(NamedTuple):
    """A process, such that no later one with the same number is taken for it."""

    number: int
    host: str
    started: str  # in ticks since the start of the machine
    boot: str  # of the machine
    namespace: str  # of process numbers: a container has its own

    def __str__(self) -> str:
        named = f"process {self.number} on host {self.host}"
        return f"{named} started {self.started} boot {self.boot} namespace {self.namespace}"

    def is_same_machine(self, other: "Holder") -> bool:
        """Whether both are known to count their processes alike; what is not known is "-"."""
        same = (self.boot, self.namespace) == (other.boot, other.namespace)
        return self.host == other.host and same and "-" not in (self.boot, self.namespace)


def hold(path: Path, what: str) -> IO[str]:
    """Take a lock, until the returned file is closed or this process ends.

    `what` begins the message if another process holds it. Before it gives up on a lock of another machine, it waits for
    FTRAIN_IO_TIMEOUT seconds.
    """
    own = _describe(os.getpid())

    def take() -> IO[str]:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _try(path)
        holder = None
        if lock is None:
            holder = _read_holder(path)
            lock = _take_over(path, holder, own)
        if lock is None:
            raise _in_use(path, what, holder, own)
        return lock

    lock = _until(take, io_timeout())
    lock.truncate(0)
    lock.write(f"{own}\n")
    lock.flush()
    return lock


def wait_for_lock(path: Path, limit: float = _LIMIT) -> IO[str]:
    """Take a lock as soon as no other process holds it, until the returned file is closed or this process ends."""
    deadline = time.monotonic() + limit
    while (lock := retry(lambda: _try(path))) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{path} is still locked by another process after {limit:g} s; if none is, delete it"
            )
        time.sleep(_POLL)
    return lock


def is_held(path: Path) -> bool:
    """Whether a process holds a lock."""
    return retry(lambda: exists(path) and _is_locked(path))


def is_still_held(lock: IO[str], path: Path) -> bool:
    """Whether a lock that was taken is still the one at `path`: False if someone deleted it and another took its place.

    One that was deleted, and that nobody has taken since, counts as held.
    """
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(path))
    except FileNotFoundError:
        return True


def _try(path: Path) -> IO[str] | None:
    """The lock at `path`, or None if it is held; what was opened may have been replaced before it was locked."""
    while True:
        lock = open(path, "a+")  # noqa: SIM115 - it is held open for as long as the lock is
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        except BlockingIOError:
            lock.close()
            return None
        except BaseException:
            lock.close()
            raise
        lock.close()


def _is_locked(path: Path) -> bool:
    with open(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _parse(lock.read())
            return holder is None or not _is_dead(holder, _describe(os.getpid()))
    return False


def _take_over(path: Path, holder: Holder | None, own: Holder) -> IO[str] | None:
    """The lock of a process that is known to have ended, replaced by one of this process; else None.

    One process at a time looks whether the dead one is still named, and puts a new file in the place of its lock.
    """
    if holder is None or not _is_dead(holder, own):
        return None
    guard = _try(path.with_name(f"{path.name}{_TAKEOVER}"))
    if guard is None:
        return None
    with guard:
        if _read_holder(path) != holder:
            return None
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        lock = open(beside, "w+")  # noqa: SIM115 - it is held open for as long as the lock is
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(beside, path)
        return lock


def _in_use(path: Path, what: str, holder: Holder | None, own: Holder) -> InUseError:
    if holder is None:
        return InUseError(f"{what} by another process; wait for it, or choose another directory")
    if holder.is_same_machine(own) or (holder.host == own.host and "-" in (own.boot, holder.boot)):
        return InUseError(
            f"{what} by process {holder.number}; wait for it, or choose another directory"
        )
    return HeldElsewhereError(
        f"{what} by process {holder.number} on host {holder.host}; wait for it, or choose another directory; if that "
        f"host is lost, its file system frees the lock after a while: try again, or make sure of it and delete {path}"
    )


def _until(take: Callable[[], IO[str]], seconds: float) -> IO[str]:
    """The lock, if it is free in time; only a lock of another machine is waited for."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return retry(take, timeout=seconds)
        except HeldElsewhereError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(min(1.0, max(_POLL, seconds / 10)))


def _read_holder(path: Path) -> Holder | None:
    try:
        return _parse(path.read_text(errors="replace"))
    except FileNotFoundError:
        return None


def _parse(text: str) -> Holder | None:
    found = _HOLDER.match(text)
    return None if found is None else Holder(int(found[1]), *found.groups()[1:])


def _is_dead(holder: Holder, own: Holder) -> bool:
    """Whether a process has certainly ended: it was one of this machine, and is not among its processes."""
    if (
        sys.platform != "linux"
        or not holder.is_same_machine(own)
        or "-" in (holder.started, own.started)
    ):
        return False
    return _started(holder.number) != holder.started


def _describe(number: int) -> Holder:
    host = re.sub(r"\s", "_", socket.gethostname()) or "-"
    return Holder(number, host, _started(number), _boot(), _namespace())


def _started(number: int) -> str:
    """When a process of this machine was started; "-" if there is none, or all of its threads have ended."""
    try:
        fields = Path("/proc", str(number), "stat").read_text().rpartition(")")[2].split()
        threads = len(os.listdir(f"/proc/{number}/task"))
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return "-"
    state, started = fields[0], fields[19]  # of the 22 that begin with the number and the name
    return "-" if state in "ZX" and threads <= 1 else started


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or "-"
    except OSError:
        return "-"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").replace(" ", "")
    except OSError:
        return "-"
