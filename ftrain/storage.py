"""Storage: what is on disk, where errors that pass are retried and only what is missing counts as missing.

A network file system can fail for a while, and a process can run out of file descriptors. Such an error says nothing
about what is stored: it is retried, and then raised, so that whoever started the process can start it again.
"""

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

TIMEOUT = (
    "FTRAIN_IO_TIMEOUT"  # a variable of the environment: seconds for which an operation is retried
)
DEFAULT_TIMEOUT = 30.0
_FIRST_DELAY = 0.05
_LONGEST_DELAY = 5.0
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})
TRANSIENT = frozenset(
    getattr(errno, name)
    for name in (
        *("ESTALE", "EIO", "ETIMEDOUT", "EAGAIN", "EINTR", "EBUSY", "EREMOTEIO", "ENOLCK"),
        *("EMFILE", "ENFILE", "ENOMEM", "ENOBUFS"),
        *("ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH"),
        *(
            "ECONNABORTED",
            "ECONNRESET",
            "ECONNREFUSED",
            "ENOTCONN",
            "ESHUTDOWN",
            "ENOLINK",
            "ECOMM",
        ),
    )
    if hasattr(errno, name)
)


def is_transient(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, is of the operating system and may pass."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in TRANSIENT:
            return True
        cause = cause.__cause__
    return False


def raise_if_transient(error: BaseException, path: str | Path) -> None:
    """Raise an OSError for `path` if `error` is transient; tensorstore hides the number of one in a ValueError."""
    if isinstance(error, OSError) and error.errno in TRANSIENT:
        raise error
    found = re.search(r"os_error_code='(\d+)'", str(error))
    if found is not None and int(found[1]) in TRANSIENT:
        code = int(found[1])
        raise OSError(code, os.strerror(code), str(path)) from error


def retry(
    action: Callable[[], T],
    *,
    timeout: float | None = None,
    before_retry: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `action` until no transient error is raised, for at most `timeout` seconds; then raise the last one.

    The delay between two calls doubles, up to 5 seconds. Without a `timeout` the limit is FTRAIN_IO_TIMEOUT seconds,
    30 if that is not set.
    """
    deadline = time.monotonic() + (io_timeout() if timeout is None else timeout)
    delay = _FIRST_DELAY
    while True:
        try:
            return action()
        except Exception as error:
            if not is_transient(error) or time.monotonic() + delay > deadline:
                raise
        sleep(delay)
        before_retry()
        delay = min(2 * delay, _LONGEST_DELAY)


def exists(path: Path) -> bool:
    """Whether there is something at `path`. Unlike pathlib's, an error is not taken for an answer."""
    return _mode(path) is not None


def is_directory(path: Path) -> bool:
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_file(path: Path) -> bool:
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def list_names(directory: Path) -> list[str]:
    """The names in a directory, sorted; none if it is missing."""
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        if error.errno not in _MISSING:
            raise
        return []


def list_files(directory: Path) -> dict[str, int]:
    """Return the size of every file below a directory, by relative path.

    Raises OSError if a part of the directory cannot be listed. Files deleted meanwhile are left
    out.
    """
    sizes: dict[str, int] = {}
    for root, _, names in os.walk(directory, onerror=_raise_unless_deleted):
        for name in names:
            path = Path(root, name)
            with suppress(FileNotFoundError):
                sizes[path.relative_to(directory).as_posix()] = path.lstat().st_size
    return sizes


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


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Replace the file at `path` atomically: readers see the old or the new one.

        with replacing(path) as temporary:
            temporary.write_bytes(data)

    The block writes to `temporary`, which must be on the file system of `path` and is beside it by
    default. If the block raises, `path` keeps its contents. After a crash of the machine, too,
    `path` has the old or the new contents.
    """
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_unless_deleted(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except ValueError:  # no path has a null character in it
        return None
    except OSError as error:
        if error.errno not in (*_MISSING, errno.ELOOP, errno.ENAMETOOLONG):
            raise
        return None


def io_timeout() -> float:
    """Seconds for which an operation is retried."""
    try:
        return max(0.0, float(os.environ[TIMEOUT]))
    except (KeyError, ValueError):
        return DEFAULT_TIMEOUT
