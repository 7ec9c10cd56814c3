"""Paths as users write them: made absolute, without `~` and `..`; URLs are refused."""

import os
import re
from pathlib import Path

RUN_CONFIG = "config.toml"  # in a run directory: the resolved config, if it has one
RUN_LOCK = "run.lock"  # in a run directory: held while a run from a config lasts

# The second form, with one slash, is a URL that went through pathlib.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[A-Za-z][A-Za-z0-9+.-]+:/")


class PathError(ValueError):
    """A path that cannot be used."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` as an absolute path without `~`, `.` and `..`; raise PathError for a URL.

    Orbax accepts no relative paths; tensorstore accepts neither `..` nor a backslash. A symbolic
    link keeps its own name. Only if `..` follows it, it is resolved, as by the operating system. To
    name a directory that looks like a URL or begins with `~`, write `./` before it.

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
    """`local_path` for files that only Python opens, not tensorstore: any name is accepted."""
    resolved = Path(os.sep)
    for part in Path(os.getcwd(), expanded(path)).parts[1:]:
        resolved = Path(os.path.realpath(resolved)).parent if part == ".." else resolved / part
    return resolved


def expanded(path: str | os.PathLike[str]) -> str:
    """Return a path or a glob pattern with `~` replaced; raise PathError if it cannot be a path."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise PathError(f"{path!r} is a path in bytes; expected a string: os.fsdecode(path)")
    if not text:
        raise PathError(
            "an empty string is not a path; expected a file or a directory, such as '.', "
            "the working directory"
        )
    if "\0" in text:
        raise PathError(f"{text!r} cannot be a path: it has a null character")
    if _URL.match(text):
        raise PathError(
            f"{_as_url(text)} is a URL; expected a local path: mount the remote directory "
            "and pass the path of the mount"
        )
    home = os.path.expanduser(text)
    if text.startswith("~") and home == text:
        raise PathError(
            f"{text}: there is no home directory of {text.split('/')[0]}; "
            f"for a path of that name, write './{text}'"
        )
    return home


def shown(path: Path) -> str:
    """Return `path` as a user would type it: relative if it is in the working directory."""
    try:
        return str(path.relative_to(os.getcwd()))
    except (ValueError, OSError):
        return str(path)


def _as_url(text: str) -> str:
    return text if "://" in text else text.replace(":/", "://", 1)
