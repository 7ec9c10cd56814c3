"""Whether all processes of a job see one and the same run directory, found out before anything is written there."""

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

VISIBLE_SECONDS = (
    30.0  # in which a file of one host appears on another; network file systems keep lists of names
)
_POLL = 0.1
_PREFIX = ".shared_check."


class Probe(NamedTuple):
    """A file that process 0 has written into a directory for the others to find."""

    directory: str
    name: str
    error: str | None  # why it could not be written


def write_probe(directory: Path) -> Probe:
    """Write a file of a random name and content; `remove_probe` removes it."""
    name = _PREFIX + secrets.token_hex(8)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    except OSError as error:
        return Probe(f"{directory}", name, error.strerror or str(error))
    return Probe(f"{directory}", name, None)


def remove_probe(probe: Probe) -> None:
    with suppress(OSError):
        (Path(probe.directory) / probe.name).unlink(missing_ok=True)


def look_for_probe(directory: Path, probe: Probe, limit: float = VISIBLE_SECONDS) -> str | None:
    """What keeps this process from using the directory that process 0 uses; None if nothing does."""
    if probe.error is not None:
        return None  # process 0 reports it
    deadline = time.monotonic() + limit
    while not _is_there(directory / probe.name):
        if time.monotonic() >= deadline:
            return f"does not see there what process 0 has written (waited {limit:g} s)"
        time.sleep(_POLL)
    return None if os.access(directory, os.W_OK) else "cannot write there"


def describe_blind(probe: Probe, found: Sequence[tuple[str, str | None]]) -> str | None:
    """One line that names the processes and hosts that cannot use the directory; None if all can."""
    if probe.error is not None:
        return f"run directory {probe.directory}: process 0 on {found[0][0]} cannot write there: {probe.error}"
    blind = [
        (index, host, problem) for index, (host, problem) in enumerate(found) if problem is not None
    ]
    if not blind:
        return None
    _, _, problem = blind[0]
    names = [f"process {index} on {host}" for index, host, _ in blind[:4]]
    more = f" and {len(blind) - len(names)} more" if len(blind) > len(names) else ""
    return (
        f"run directory {probe.directory}: {', '.join(names)}{more} {problem}; process 0 is on {found[0][0]}. "
        "Choose a directory on a file system that all hosts share and may write to"
    )


def _is_there(path: Path) -> bool:
    with suppress(
        OSError
    ):  # asks a network file system anew what is in the directories, instead of what it remembers
        for directory in (path.parent.parent, path.parent):
            with os.scandir(directory) as entries:
                next(entries, None)
    try:
        return path.read_text() == path.name
    except (OSError, UnicodeError):
        return False
