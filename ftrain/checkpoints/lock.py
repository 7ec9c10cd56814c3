"""Locks: one process at a time works in a directory.

A lock is a file with an exclusive `flock`, which the system releases when its process ends. In two
cases the process has ended and the lock remains:

- A forked child has inherited the file. Such a lock is taken over, if the process ran on this
  machine and no longer does.
- The machine is lost. A network file system then keeps the lock until the lease of that machine
  ends. Whether the process is alive cannot be known from here, so such a lock is never taken over;
  InUseError names the host and what to do.
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

_TAKEOVER = ".takeover"  # suffix of a lock that is held while another lock is taken over
_TIMEOUT = 600.0  # seconds; these locks are held while a checkpoint or a catalog is written
_POLL = 0.05  # seconds
_HOLDER = re.compile(r"process (\d+) on host (\S+) started (\S+) boot (\S+) namespace (\S+)")


class InUseError(RuntimeError):
    """Another process uses the directory."""


class HeldElsewhereError(InUseError):
    """A process of another machine uses the directory, or did when that machine was lost."""


class Holder(NamedTuple):
    """A process, with enough facts to distinguish it from a later one with the same id."""

    pid: int
    host: str
    started: str  # in ticks since the machine booted
    boot: str  # the boot id of the machine
    namespace: str  # of process ids: a container has its own

    def __str__(self) -> str:
        named = f"process {self.pid} on host {self.host}"
        return f"{named} started {self.started} boot {self.boot} namespace {self.namespace}"

    def is_same_machine(self, other: "Holder") -> bool:
        """Return True if both share their process ids for certain; "-" stands for unknown."""
        same = (self.boot, self.namespace) == (other.boot, other.namespace)
        return self.host == other.host and same and "-" not in (self.boot, self.namespace)


def hold(path: Path, what: str) -> IO[str]:
    """Take a lock, until the returned file is closed or this process ends.

    Raises InUseError, with a message that begins with `what`, if another process holds it. For a
    lock of another machine it waits FTRAIN_IO_TIMEOUT seconds first.
    """
    own = _describe(os.getpid())

    def take() -> IO[str]:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _try_lock(path)
        holder = None
        if lock is None:
            holder = _read_holder(path)
            lock = _take_over(path, holder, own)
        if lock is None:
            raise _in_use_error(path, what, holder, own)
        return lock

    lock = _take_within(take, io_timeout())
    lock.truncate(0)
    lock.write(f"{own}\n")
    lock.flush()
    return lock


def wait_for_lock(path: Path, timeout: float = _TIMEOUT) -> IO[str]:
    """Wait for a lock and take it, until the returned file is closed or this process ends."""
    deadline = time.monotonic() + timeout
    while (lock := retry(lambda: _try_lock(path))) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{path} is still locked by another process after {timeout:g} s; "
                "if no process uses the directory, delete the file"
            )
        time.sleep(_POLL)
    return lock


def is_held(path: Path) -> bool:
    """Return True if a process holds a lock."""
    return retry(lambda: exists(path) and _is_locked(path))


def is_still_held(lock: IO[str], path: Path) -> bool:
    """Return False if a lock was deleted and another process has taken it since.

    A lock that was deleted, and that no process has taken since, counts as held.
    """
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(path))
    except FileNotFoundError:
        return True


def _try_lock(path: Path) -> IO[str] | None:
    """Return the lock at `path`, or None if it is held."""
    while True:  # again if the file was replaced between opening and locking
        lock = open(path, "a+")  # noqa: SIM115 - open while the lock is held
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
    """Replace the lock of a process that has certainly ended; None if it may be alive.

    A second lock guards this, so that only one process replaces the file.
    """
    if holder is None or not _is_dead(holder, own):
        return None
    guard = _try_lock(path.with_name(f"{path.name}{_TAKEOVER}"))
    if guard is None:
        return None
    with guard:
        if _read_holder(path) != holder:
            return None
        # Not `storage.replacing`: the new file must be locked before it gets its name.
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        lock = open(temporary, "w+")  # noqa: SIM115 - open while the lock is held
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(temporary, path)
        return lock


def _in_use_error(path: Path, what: str, holder: Holder | None, own: Holder) -> InUseError:
    if holder is None:
        return InUseError(f"{what} by another process; wait for it, or choose another directory")
    if holder.is_same_machine(own) or (holder.host == own.host and "-" in (own.boot, holder.boot)):
        return InUseError(
            f"{what} by process {holder.pid}; wait for it, or choose another directory"
        )
    return HeldElsewhereError(
        f"{what} by process {holder.pid} on host {holder.host}; "
        "wait for it, or choose another directory; "
        "if that host is lost, its file system frees the lock after a while: "
        f"retry later, or check that the host is down and delete {path}"
    )


def _take_within(take: Callable[[], IO[str]], seconds: float) -> IO[str]:
    """Take a lock; wait only for a lock of another machine."""
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
    """Return True if a process has certainly ended: it ran on this machine, and no longer does."""
    if (
        sys.platform != "linux"
        or not holder.is_same_machine(own)
        or "-" in (holder.started, own.started)
    ):
        return False
    return _start_time(holder.pid) != holder.started


def _describe(pid: int) -> Holder:
    host = re.sub(r"\s", "_", socket.gethostname()) or "-"
    return Holder(pid, host, _start_time(pid), _boot_id(), _pid_namespace())


def _start_time(pid: int) -> str:
    """Return the start time of a process; "-" if it, or each of its threads, has ended."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return "-"
    state = fields[0]  # the third field of the file: the pid and the name come before it
    started = fields[19]
    return "-" if state in "ZX" and threads <= 1 else started


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or "-"
    except OSError:
        return "-"


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").replace(" ", "")
    except OSError:
        return "-"
