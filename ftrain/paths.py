"""Paths as users give them: one function makes each of them absolute, without `..`, and refuses a URL."""

import os
import re
from pathlib import Path

_URL = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://|[A-Za-z][A-Za-z0-9+.-]+:/"
)  # pathlib makes one slash of two


class PathError(ValueError):
    """A path that cannot be used."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """`path` as an absolute path without `~`, `.` and `..`; PathError if it is a URL or cannot be a path.

    Orbax accepts no relative path, and tensorstore none with `..` or a backslash in it. A symbolic link keeps its own
    name, unless `..` follows it: that is the parent of its target, as for the operating system. To name a directory
    that looks like a URL or begins with `~`, write `./` before it.

    >>> local_path("/data/runs/../runs/digits/")
    PosixPath('/data/runs/digits')
    """
    resolved = absolute(path)
    try:
        str(resolved).encode()
    except UnicodeEncodeError:
        raise PathError(
            f"{str(resolved)!r} cannot be used: its bytes are not UTF-8; rename it"
        ) from None
    if "\\" in str(resolved):
        raise PathError(
            f"{resolved} cannot be used: tensorstore takes its backslash for a slash; rename it"
        )
    return resolved


def absolute(path: str | os.PathLike[str]) -> Path:
    """As `local_path`, for a file that only the operating system opens: its name may be any bytes."""
    resolved = Path(os.sep)
    for part in Path(os.getcwd(), expanded(path)).parts[1:]:
        resolved = Path(os.path.realpath(resolved)).parent if part == ".." else resolved / part
    return resolved


def expanded(path: str | os.PathLike[str]) -> str:
    """`path`, which may be a pattern, with `~` replaced; PathError if it is a URL or cannot be a path."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise PathError(f"{path!r} is a path in bytes; expected text, os.fsdecode(path)")
    if not text:
        raise PathError(
            "an empty text is no path; expected a directory or a file, '.' for the working directory"
        )
    if "\0" in text:
        raise PathError(f"{text!r} cannot be a path: it has a null character")
    if _URL.match(text):
        raise PathError(
            f"{_as_url(text)} is a URL; expected a local path: mount the remote directory, and give its path"
        )
    home = os.path.expanduser(text)
    if text.startswith("~") and home == text:
        raise PathError(
            f"{text}: there is no home directory of {text.split('/')[0]}; './{text}' is a path of that name"
        )
    return home


def shown(path: Path) -> str:
    """`path` as a person would type it: relative if it is inside of the working directory."""
    try:
        return str(path.relative_to(os.getcwd()))
    except (ValueError, OSError):
        return str(path)


def _as_url(text: str) -> str:
    return text if "://" in text else text.replace(":/", "://", 1)
