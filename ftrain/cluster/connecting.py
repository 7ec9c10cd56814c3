"""Connecting: from a spec, a job and an index to a process among others, with limits on every wait."""

import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftrain.cluster.addresses import Address, parse_address
from ftrain.cluster.company import Company, check_facts, create_local
from ftrain.cluster.environment import membership
from ftrain.cluster.job_token import JobToken, find_token
from ftrain.cluster.line import ClusterError, Line, MismatchError
from ftrain.cluster.reachability import (
    Host,
    check_reachable,
    control_address,
    explain_bind_error,
    explain_loopback_hosts,
    find_host,
)
from ftrain.cluster.spec import ClusterSpec, check_usable, processes
from ftrain.cluster.switchboard import Switchboard
from ftrain.launching.ports import free_addresses
from ftrain.launching.reporter import reporter_of_this_process

START = "the start of the job"
LONG = 10.0  # seconds of waiting after which it is said what for


def connect(
    spec: ClusterSpec | None = None,
    job: str = "worker",
    index: int = 0,
    *,
    limit: float = 60.0,
    heartbeat: float = 100.0,
    facts: Mapping[str, Any] | None = None,
    directory: str | Path | None = None,
) -> Company:
    """Be task `index` of `job`: meet the other processes, then start `jax.distributed` with them.

    Without a spec the environment says which process this is, see `membership`; if it says nothing, it is the only one.

    Process 0 listens at the address that the spec names for it, or at loopback if all are on one host, and the runtime
    of the devices at another port there. Call this before anything touches a device.

    The processes prove to each other that they know the job token: `ftrain launch` gives them one. Without it, it is
    FTRAIN_JOB_TOKEN, or the file `job_token` that the first of them creates in `directory` or, without one, in
    `~/.config/ftrain`. This keeps strangers away from the control connections; what is sent is not encrypted, and the
    runtime's own connections are not protected at all: use a network that you trust.

    Args:
      limit: seconds that they wait for the first process, and then for all others; ClusterError names who did not come.
      heartbeat: seconds after which the runtime takes a process that does not move for lost.
      facts: what must be equal everywhere, beside the versions of jax and ftrain; who differs is named, and in what.
      directory: the run directory; all processes have to see the same one, and the hosts that do not are named.
    """
    reporter_of_this_process()  # who started this process, if anyone did, hears of it from here on
    if spec is None:
        member = membership()
        if member is None:
            return create_local()
        spec, job, index = member.spec, member.job, member.index
    check_usable(spec)
    members = processes(spec)
    numbers = {(name, task): number for number, (name, task, _) in enumerate(members)}
    if (job, index) not in numbers:
        there = ", ".join(f"{name}:{task}" for name, task, _ in members)
        raise ValueError(
            f"{job}:{index} is not a process that trains in this cluster; there are {there}"
        )
    number, addresses = numbers[job, index], [parse_address(each) for _, _, each in members]
    company = Company(spec, number, len(members))
    if len(members) == 1:
        return company
    check_reachable(addresses, number)
    address, token = control_address(addresses), find_token(directory)
    deadline = time.monotonic() + limit
    switchboard = _open(address, len(members), token, deadline) if number == 0 else None
    try:
        with _said_if_long(f"process {number} of {len(members)} waits for the others at {address}"):
            line = Line(address, number, len(members), limit, company.listen, token)
            company.join(line, switchboard)
            told = _meet(company, address, limit, dict(facts or {}))
        if directory is not None:
            company.check_directory(directory)
        _start_runtime(company, Address(address.host, told[0]["port"]), limit, heartbeat)
        _check_hosts([Host(*each["host"]) for each in told])
    except BaseException as error:
        company.fail(error)
        if switchboard is not None and not company.is_bound:
            switchboard.close()
        raise
    return company


@contextmanager
def _said_if_long(text: str) -> Iterator[None]:
    """Say what is waited for, if it takes long and nobody else does."""
    timer = threading.Timer(LONG, lambda: print(f"ftrain: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    if not reporter_of_this_process().has_supervisor:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _open(address: Address, count: int, token: JobToken, deadline: float) -> Switchboard:
    try:
        return Switchboard(address, count, token)
    except socket.gaierror as error:  # a name that is just being given, as on Kubernetes
        if time.monotonic() < deadline:
            time.sleep(0.5)
            return _open(address, count, token, deadline)
        raise ClusterError(
            f"process 0 does not find its own address, {address}: {error.strerror}"
        ) from None
    except OSError as error:
        raise ClusterError(
            f"process 0 cannot listen at {address}, its address in the cluster: {explain_bind_error(address, error)}"
        ) from None


def _meet(company: Company, address: Address, limit: float, facts: dict[str, Any]) -> list[Any]:
    """Wait for all processes, and compare their facts; returns the port and the host of each."""
    port = _free_port(address.host) if company.is_chief else None
    own = {"facts": _versions() | facts, "port": port, "host": find_host()}
    told = company.gather(START, own, limit)
    check_facts([each["facts"] for each in told])
    return told


def _start_runtime(company: Company, runtime: Address, limit: float, heartbeat: float) -> None:
    import jax

    company.bind()
    jax.distributed.initialize(
        coordinator_address=str(runtime),
        coordinator_bind_address=str(runtime),
        num_processes=company.count,
        process_id=company.index,
        cluster_detection_method="deactivate",
        initialization_timeout=max(5, round(limit)),
        heartbeat_timeout_seconds=max(1, round(heartbeat)),
        shutdown_timeout_seconds=30,
    )
    jax.devices()  # all processes look for each other's devices now: none could do that alone later


def _check_hosts(hosts: list[Host]) -> None:
    import jax

    unreachable = explain_loopback_hosts(hosts)
    if (
        unreachable is not None and jax.default_backend() == "cpu"
    ):  # whose collectives connect hosts by their own names
        raise MismatchError(unreachable)


def _versions() -> dict[str, str]:
    import jax

    import ftrain

    return {"ftrain": ftrain.__version__, "jax": jax.__version__}


def _free_port(host: str) -> int:
    """A port for the runtime's own coordinator; the one that the spec names is the control server's."""
    return parse_address(free_addresses(1, host)[0]).port
