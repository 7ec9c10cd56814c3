"""Launchers that a run directory belongs to, also between two attempts, when none of their processes is there."""

import os
import re
import socket
from pathlib import Path

from ftrain.config.load import ConfigError
from ftrain.launching.protocol import LAUNCHER


def sign(before: str, directory: Path) -> str:
    """What a process adds to the lock of a run directory, if a launcher started it.

    `before` is what stood in it: if that names another launcher which lives, it is about to start its processes anew,
    and ConfigError says that the directory is in use.
    """
    own = _signature(os.environ.get(LAUNCHER, ""))
    for signature in re.findall(r"^launcher .*$", before, re.MULTILINE):
        number = signature.split()[1]
        if signature not in (own, "") and signature == _signature(number):
            raise ConfigError(
                f"run.directory: {directory} is in use by ftrain launch, process {number}; "
                "wait for it, or choose another directory"
            )
    return f"{own}\n" if own else ""


def _signature(number: str) -> str:
    """A process that lives on this host, such that no later one of the same number is taken for it; else nothing."""
    try:
        fields = Path("/proc", number, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    started, state = fields[19], fields[0]  # of the 22 that begin with the number and the name
    return (
        f"launcher {number} {started} {socket.gethostname()}"
        if number.isdecimal() and state not in "ZX"
        else ""
    )
