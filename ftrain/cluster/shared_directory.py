"""Checks that all processes of a job see the same run directory, before they write to it."""

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

VISIBLE_SECONDS = 30.0  # until a file of one host appears on another: network file systems cache
_POLL = 0.1
_PREFIX = ".shared_check."


class Probe(NamedTuple):
    """A file that process 0 has written to a directory for the others to find."""

    directory: str
    name: str
    error: str | None  # why it could not be written


def write_probe(directory: Path) -> Probe:
    """Write a file with a random name; `remove_probe` removes it."""
    name = _PREFIX + secrets.token_hex(8)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    except OSError as error:
        return Probe(f"{directory}", name, error.strerror or str(error))
    return Probe(f"{directory}", name, None)


def remove_probe(probe: Probe) -> None:
    """Remove the file of `write_probe`."""
    with suppress(OSError):
        (Path(probe.directory) / probe.name).unlink(missing_ok=True)


def look_for_probe(directory: Path, probe: Probe, limit: float = VISIBLE_SECONDS) -> str | None:
    """Return why this process cannot use the directory of process 0, or None if it can."""
    if probe.error is not None:
        return None  # process 0 reports it
    deadline = time.monotonic() + limit
    while not _is_visible(directory / probe.name):
        if time.monotonic() >= deadline:
            return f"does not see the file that process 0 has written (waited {limit:g} s)"
        time.sleep(_POLL)
    return None if os.access(directory, os.W_OK) else "cannot write there"


def describe_blind(probe: Probe, found: Sequence[tuple[str, str | None]]) -> str | None:
    """Return one line with the processes that cannot use the directory, or None if all can."""
    if probe.error is not None:
        return (
            f"run directory {probe.directory}: "
            f"process 0 on {found[0][0]} cannot write there: {probe.error}"
        )
    blind = [
        (index, host, problem) for index, (host, problem) in enumerate(found) if problem is not None
    ]
    if not blind:
        return None
    _, _, problem = blind[0]
    names = [f"process {index} on {host}" for index, host, _ in blind[:4]]
    more = f" and {len(blind) - len(names)} more" if len(blind) > len(names) else ""
    return (
        f"run directory {probe.directory}: {', '.join(names)}{more} {problem}; "
        f"process 0 is on {found[0][0]}. "
        "Choose a directory on a file system that all hosts share and may write to"
    )


def _is_visible(path: Path) -> bool:
    with suppress(OSError):  # makes a network file system refresh its cache of the directories
        for directory in (path.parent.parent, path.parent):
            with os.scandir(directory) as entries:
                next(entries, None)
    try:
        return path.read_text() == path.name
    except (OSError, UnicodeError):
        return False
