"""Connecting: from a spec, a job and an index to a process among others, with limits on every wait."""

import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ftrain.cluster.addresses import Address, parse_address
from ftrain.cluster.company import Company, check_facts, create_local
from ftrain.cluster.environment import membership
from ftrain.cluster.line import ClusterError, Line
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
) -> Company:
    """Be task `index` of `job`: meet the other processes, then start `jax.distributed` with them.

    Without a spec the environment says which process this is, see `membership`; if it says nothing, it is the only one.

    The first process listens at the address that the spec names for it, and the runtime of the devices at another port
    of the same host. Call this before anything touches a device.

    Args:
      limit: seconds that they wait for the first process, and then for all others; ClusterError names who did not come.
      heartbeat: seconds after which the runtime takes a process that does not move for lost.
      facts: what must be equal everywhere, beside the versions of jax and ftrain; who differs is named, and in what.
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
        raise ValueError(f"{job}:{index} is not a process that trains in this cluster; there are {there}")
    number, address = numbers[job, index], parse_address(members[0][2])
    company = Company(spec, number, len(members))
    if len(members) == 1:
        return company
    deadline = time.monotonic() + limit
    switchboard = _open(address, len(members), deadline) if number == 0 else None
    try:
        with _said_if_long(f"process {number} of {len(members)} waits for the others, who are to come to {address}"):
            line = Line(address, number, len(members), limit, company.listen)
            company.join(line, switchboard)
            _meet(company, address, limit, heartbeat, dict(facts or {}))
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


def _open(address: Address, count: int, deadline: float) -> Switchboard:
    try:
        return Switchboard(address, count)
    except socket.gaierror as error:  # a name that is just being given, as on Kubernetes
        if time.monotonic() < deadline:
            time.sleep(0.5)
            return _open(address, count, deadline)
        raise ClusterError(f"process 0 does not find its own address, {address}: {error.strerror}") from None
    except OSError as error:
        raise ClusterError(
            f"process 0 cannot listen at {address}, its address in the cluster: {error.strerror or error}; "
            "is another job running there? choose another port"
        ) from None


def _meet(company: Company, address: Address, limit: float, heartbeat: float, facts: dict[str, Any]) -> None:
    """Compare what the processes have come with, and have the runtime of the devices meet, too."""
    port = _free_port(address.host) if company.is_chief else None
    own = {"facts": _versions() | facts, "port": port}
    told = company.gather(START, own, limit)
    check_facts([each["facts"] for each in told])
    runtime = Address(address.host, told[0]["port"])
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


def _versions() -> dict[str, str]:
    import jax

    import ftrain

    return {"ftrain": ftrain.__version__, "jax": jax.__version__}


def _free_port(host: str) -> int:
    """A port for the runtime's own coordinator; the one that the spec names is the switchboard's."""
    return parse_address(free_addresses(1, host)[0]).port
