"""Connecting: from a spec, a job and an index to a process group, with a limit on every wait."""

import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftrain.cluster.addresses import (
    Address,
    Host,
    check_reachable,
    control_address,
    explain_bind_error,
    explain_loopback_hosts,
    find_host,
    parse_address,
)
from ftrain.cluster.control_client import ControlClient
from ftrain.cluster.control_protocol import ClusterError, ProcessMismatchError
from ftrain.cluster.control_server import ControlServer
from ftrain.cluster.environment import membership
from ftrain.cluster.job_token import JobToken, find_token
from ftrain.cluster.process_group import ProcessGroup, check_facts, create_local
from ftrain.cluster.spec import ClusterSpec, check_usable, processes
from ftrain.launching.child_environment import free_addresses
from ftrain.launching.reporter import Reporter, reporter_of_this_process

START = "the start of the job"
LOG_AFTER = 10.0  # seconds of waiting after which a line is logged


def connect(
    spec: ClusterSpec | None = None,
    job: str = "worker",
    index: int = 0,
    *,
    limit: float = 60.0,
    heartbeat: float = 100.0,
    facts: Mapping[str, Any] | None = None,
    directory: str | Path | None = None,
    reporter: Reporter | None = None,
) -> ProcessGroup:
    """Connect to the other processes as task `index` of `job`, then start `jax.distributed`.

    Without a spec, the environment variables of the launcher identify this process, see
    `membership`. Without those, the group has this process only.

    Process 0 listens at its address in the spec, or at loopback if all processes are on one host.
    The runtime of the devices uses another port there. Call this before anything touches a device.

    The processes prove to each other that they know the job token. `ftrain launch` gives them one.
    Otherwise it is FTRAIN_JOB_TOKEN, or the file `job_token` that the first process creates in
    `directory` or, without one, in `~/.config/ftrain`. This keeps strangers out of the control
    connections. They are not encrypted, and the runtime's own connections are not protected at
    all: use a trusted network.

    Args:
      limit: seconds to wait for process 0, and then for all others; ClusterError names those that
        are missing.
      heartbeat: seconds after which the runtime considers a silent process lost.
      facts: values that must be equal in all processes, besides the versions of jax and ftrain.
      directory: the run directory. All processes must see the same one; ProcessMismatchError
        names the hosts that do not.
      reporter: reports to the supervisor from now on; default: the one of this process.
    """
    reporter = reporter or reporter_of_this_process()
    if spec is None:
        member = membership()
        if member is None:
            return create_local()
        spec = member.spec
        job = member.job
        index = member.index
    check_usable(spec)
    members = processes(spec)
    numbers = {(name, task): number for number, (name, task, _) in enumerate(members)}
    if (job, index) not in numbers:
        known = ", ".join(f"{name}:{task}" for name, task, _ in members)
        raise ValueError(
            f"{job}:{index} is not a process that trains in this cluster; there are {known}"
        )
    number = numbers[job, index]
    addresses = [parse_address(each) for _, _, each in members]
    group = ProcessGroup(spec, number, len(members))
    if len(members) == 1:
        return group
    check_reachable(addresses, number)
    address = control_address(addresses)
    token = find_token(directory)
    deadline = time.monotonic() + limit
    server = _open_server(address, len(members), token, deadline) if number == 0 else None
    try:
        with _log_if_slow(
            f"process {number} of {len(members)} waits for the others at {address}", reporter
        ):
            client = ControlClient(address, number, len(members), limit, group.handle, token)
            group.attach(client, server)
            gathered = _exchange_facts(group, address, limit, dict(facts or {}))
        if directory is not None:
            group.check_directory(directory)
        _start_runtime(group, Address(address.host, gathered[0]["port"]), limit, heartbeat)
        _check_hosts([Host(*each["host"]) for each in gathered])
    except BaseException as error:
        group.fail(error)
        if server is not None and not group.is_bound:
            server.close()
        raise
    return group


@contextmanager
def _log_if_slow(text: str, reporter: Reporter) -> Iterator[None]:
    """Log `text` if the block takes long, unless a supervisor logs the progress."""
    timer = threading.Timer(
        LOG_AFTER, lambda: print(f"ftrain: {text}", file=sys.stderr, flush=True)
    )
    timer.daemon = True
    if not reporter.has_supervisor:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _open_server(address: Address, count: int, token: JobToken, deadline: float) -> ControlServer:
    try:
        return ControlServer(address, count, token)
    except socket.gaierror as error:  # a name that is not assigned yet, as on Kubernetes
        if time.monotonic() < deadline:
            time.sleep(0.5)
            return _open_server(address, count, token, deadline)
        raise ClusterError(
            f"process 0 cannot resolve its own address, {address}: {error.strerror}"
        ) from None
    except OSError as error:
        raise ClusterError(
            f"process 0 cannot listen at {address}, its address in the cluster: "
            f"{explain_bind_error(address, error)}"
        ) from None


def _exchange_facts(
    group: ProcessGroup, address: Address, limit: float, facts: dict[str, Any]
) -> list[Any]:
    """Wait for all processes and compare their facts; return the port and the host of each."""
    port = _free_port(address.host) if group.is_chief else None
    own = {"facts": _versions() | facts, "port": port, "host": find_host()}
    gathered = group.gather(START, own, limit)
    check_facts([each["facts"] for each in gathered])
    return gathered


def _start_runtime(group: ProcessGroup, runtime: Address, limit: float, heartbeat: float) -> None:
    import jax

    group.bind()
    jax.distributed.initialize(
        coordinator_address=str(runtime),
        coordinator_bind_address=str(runtime),
        num_processes=group.count,
        process_id=group.index,
        cluster_detection_method="deactivate",
        initialization_timeout=max(5, round(limit)),
        heartbeat_timeout_seconds=max(1, round(heartbeat)),
        shutdown_timeout_seconds=30,
    )
    jax.devices()  # now, because the processes can only exchange their devices together


def _check_hosts(hosts: list[Host]) -> None:
    import jax

    unreachable = explain_loopback_hosts(hosts)
    # The collectives of CPUs connect hosts by their own names.
    if unreachable is not None and jax.default_backend() == "cpu":
        raise ProcessMismatchError(unreachable)


def _versions() -> dict[str, str]:
    import jax

    import ftrain

    return {"ftrain": ftrain.__version__, "jax": jax.__version__}


def _free_port(host: str) -> int:
    """Return a port for the runtime's coordinator; the one of the spec is the control server's."""
    return parse_address(free_addresses(1, host)[0]).port
