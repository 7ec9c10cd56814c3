"""What child processes are started with: addresses, environment variables, GPUs and a lifeline."""

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ftrain.launching import protocol

VISIBLE_GPUS = "JAX_CUDA_VISIBLE_DEVICES"  # read by jax
_DEVICES = Path("/dev")


def child_environments(
    processes: int,
    *,
    hang_timeout: float,
    host: str = "127.0.0.1",
    attempt: int = 0,
    inject: str | None = None,
    gpus: int | None = None,
    after_failure: int | None = None,
) -> list[dict[str, str]]:
    """Return the environment of each process: this process's own, and its place in the job."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in protocol.VARIABLES
    }
    inherited[protocol.LAUNCHER] = f"{os.getpid()}"
    inherited[protocol.TOKEN] = secrets.token_hex(32)  # a new one for each group of processes
    if after_failure is not None:
        inherited[protocol.AFTER_FAILURE] = f"{after_failure}"
    # Without this, the last lines of a killed process would be lost.
    inherited.setdefault("PYTHONUNBUFFERED", "1")
    addresses = free_addresses(processes, host)
    return [
        inherited
        | child_variables(
            index, addresses, hang_timeout=hang_timeout, attempt=attempt, inject=inject, gpus=gpus
        )
        for index in range(processes)
    ]


def child_variables(
    index: int,
    addresses: Sequence[str],
    *,
    hang_timeout: float,
    attempt: int,
    inject: str | None,
    gpus: int | None,
) -> dict[str, str]:
    """Return the variables that differ between groups and processes, except file descriptors.

    With `gpus`, each process sees that number of GPUs, and no two processes see the same one.
    """
    cluster = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    variables = {
        protocol.CLUSTER: json.dumps(cluster),
        protocol.HANG_TIMEOUT: f"{hang_timeout}",
        protocol.ATTEMPT: f"{attempt}",
    }
    if inject is not None:
        variables[protocol.INJECT] = inject
    if gpus is not None:
        visible = range(index * gpus, (index + 1) * gpus)
        variables[VISIBLE_GPUS] = ",".join(str(gpu) for gpu in visible)
    return variables


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """Return `count` different addresses on `host` whose ports were free a moment ago."""
    family, _, _, _, _ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    with ExitStack() as stack:  # holds every port until the last is found, so that all differ
        sockets = [
            stack.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(count)
        ]
        for each in sockets:
            each.bind((host, 0))
        shown = f"[{host}]" if ":" in host else host
        return [f"{shown}:{each.getsockname()[1]}" for each in sockets]


def share_of_gpus(
    processes: int, environ: Mapping[str, str] | None = None, devices: Path = _DEVICES
) -> int | None:
    """Return the number of GPUs for each process, or None to leave the choice to the processes.

    A process uses every GPU that it sees and allocates most of its memory, so two processes cannot
    share one. The result is None if there are no GPUs, or fewer than processes.
    """
    environ = os.environ if environ is None else environ
    platforms = environ.get("JAX_PLATFORMS", "").split(",")
    if processes == 1 or platforms == ["cpu"] or VISIBLE_GPUS in environ:
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        count = sum(
            path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia*")
        )
    else:
        count = len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return count // processes or None


@contextmanager
def open_lifeline() -> Iterator[int]:
    """Yield a file descriptor that reaches end of file when this process dies, however it dies."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)
