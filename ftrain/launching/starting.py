"""What processes are started with: an environment each, and a lifeline."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from ftrain.launching import contract
from ftrain.launching.ports import free_addresses


def environments(
    processes: int,
    *,
    hang_timeout: float,
    host: str = "127.0.0.1",
    attempt: int = 0,
    inject: str | None = None,
    gpus: int | None = None,
    after_failure: int | None = None,
) -> list[dict[str, str]]:
    """One for each process: that of this one, and what it is told of its place among the others, on ports that are
    free."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in contract.VARIABLES
    }
    inherited[contract.LAUNCHER] = f"{os.getpid()}"
    inherited[contract.TOKEN] = secrets.token_hex(
        32
    )  # of this group only: nobody else can talk to its processes
    if after_failure is not None:
        inherited[contract.AFTER_FAILURE] = f"{after_failure}"
    inherited.setdefault(
        "PYTHONUNBUFFERED", "1"
    )  # or the last lines of a process that is killed would be lost
    addresses = free_addresses(processes, host)
    return [
        inherited
        | contract.environment(
            index, addresses, hang_timeout=hang_timeout, attempt=attempt, inject=inject, gpus=gpus
        )
        for index in range(processes)
    ]


@contextmanager
def open_lifeline() -> Iterator[int]:
    """A file descriptor that is at its end once this process is gone, however that happens."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)
