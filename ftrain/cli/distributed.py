"""How `ftrain train` joins a distributed job, if it is one of its processes."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ftrain.cli.exit_codes import exit_code
from ftrain.storage import is_transient

if TYPE_CHECKING:
    from ftrain.cluster import ProcessGroup
    from ftrain.config import Job
    from ftrain.config.plan import Plan
    from ftrain.hooks import Faults
    from ftrain.launching.reporter import Reporter

BUILD_SECONDS = 600.0  # for process 0 to build the job, which may write data first
DEFAULT_HEARTBEAT = 100.0  # seconds


def join(
    plan: "Plan", cluster: Path | None, task: str | None, reporter: "Reporter"
) -> "ProcessGroup":
    """Connect to the job that the command line or the environment describes; else train alone."""
    from ftrain.cluster import ClusterError, connect, create_local
    from ftrain.cluster.environment import membership
    from ftrain.config.load import ConfigError
    from ftrain.launching.protocol import HANG_TIMEOUT

    environ = dict(os.environ)
    if cluster is None and task is not None:
        raise ConfigError("--task needs --cluster FILE, which names the processes of the job")
    if environ.get("FTRAIN_CLUSTER") == "auto":
        raise ConfigError(
            "FTRAIN_CLUSTER must name the processes, got auto; "
            "set it to JSON, or pass --cluster FILE --task worker:0"
        )
    if cluster is not None:
        environ |= {
            "FTRAIN_CLUSTER": f"@{cluster}",
            "FTRAIN_TASK": task or environ.get("FTRAIN_TASK", ""),
        }
    limits = plan.calls["cluster"].arguments
    hang_timeout = float(environ.get(HANG_TIMEOUT, 0)) or limits["hang_timeout"] or None
    try:
        member = membership(environ)
        if member is None:
            return create_local()
        return connect(
            member.spec,
            member.job,
            member.index,
            limit=limits["connect_timeout"],
            heartbeat=_heartbeat(hang_timeout),
            facts=_facts(plan),
            directory=plan.calls["run"].arguments["directory"],
            reporter=reporter,
        )
    except ClusterError:
        raise
    except (ValueError, OSError) as error:
        if is_transient(error):
            raise
        reason = str(error)
        if cluster is not None:  # name the options, not the environment variables
            reason = reason.replace("FTRAIN_CLUSTER", "--cluster").replace("FTRAIN_TASK", "--task")
        raise ConfigError(f"the cluster cannot be joined: {reason}") from None


class DeferredStop:
    """Keeps a request to stop that arrives before there is a run to stop."""

    def __init__(self) -> None:
        self._early: list[str] = []
        self._stop: Callable[[str], None] = self._early.append
        self._changing = threading.Lock()

    def request(self, reason: str) -> None:
        """Stop the run, now or as soon as there is one."""
        with self._changing:
            self._stop(reason)

    def forward_to(self, stop: Callable[[str], None]) -> None:
        """Call `stop` from now on, and at once if a request has arrived before."""
        with self._changing:
            self._stop = stop
            for reason in self._early[:1]:
                stop(reason)


@contextmanager
def report_failures(reporter: "Reporter", group: "ProcessGroup") -> Iterator[None]:
    """While this is entered, report to the supervisor if another process ends this one."""
    from ftrain.launching.protocol import Failed

    group.on_peer_failure = lambda why, process: reporter.send(
        Failed("PeerFailed", why, because=process)
    )
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        group.exit_code = 130 if isinstance(error, KeyboardInterrupt) else exit_code(error) or 1
        raise
    finally:
        reporter.close()


def build_chief_first(plan: "Plan", group: "ProcessGroup") -> "Job":
    """Build the job, in process 0 before the others: it may have to write the data they read."""
    from ftrain.config import build

    job = build(plan) if group.is_chief else None
    group.barrier("the first process has built the job", BUILD_SECONDS)
    job = job or build(plan)
    _check_after_failure(job)
    return job


@contextmanager
def claim_directory(job: "Job", group: "ProcessGroup", accept_changes: bool) -> Iterator[None]:
    """Claim the run directory: process 0 does it for all."""
    from ftrain.config import claim

    resolved = job.plan.resolved()
    with (
        claim(job.directory, resolved, accept_changes=accept_changes)
        if group.is_chief
        else nullcontext()
    ):
        group.barrier("the run directory", BUILD_SECONDS)
        yield


def injected_faults(directory: Path, rank: int) -> "Faults | None":
    """Return the hook that injects the faults of `ftrain launch --inject`, if there are any."""
    from ftrain.hooks import Faults
    from ftrain.launching import parse_faults, protocol

    text = os.environ.get(protocol.INJECT)
    if not text:
        return None
    note = directory / f"faults_{rank}.txt"
    if os.environ.get(protocol.ATTEMPT, "0") == "0":
        note.unlink(missing_ok=True)
    return Faults(parse_faults(text), rank, note)


def _heartbeat(hang_timeout: float | None) -> float:
    """Return the heartbeat timeout of the runtime.

    The runtime ends a process without a reason. So ftrain's own checks, which report one, come
    first.
    """
    return DEFAULT_HEARTBEAT if hang_timeout is None else 2 * hang_timeout + 10


def _check_after_failure(job: "Job") -> None:
    """Check that the config also fits the processes of a restart, as far as that is known now."""
    import jax

    from ftrain.cluster.mesh import AXES, check_processes
    from ftrain.config.load import ConfigError
    from ftrain.launching.protocol import AFTER_FAILURE

    text = os.environ.get(AFTER_FAILURE)
    if not text:
        return
    mesh = job.plan.calls["mesh"].arguments
    each = jax.local_device_count()
    try:
        asked = {axis: mesh[axis] for axis in AXES}
        axes = check_processes(int(text), each, job.pipeline.batch_size, **asked)
        job.sharding.specs(job.abstract_state(), axes)
    except ValueError as error:
        raise ConfigError(
            f"--processes-after-failure {text}: a restart with {text} processes "
            f"of {each} device(s) would fail: {error}"
        ) from None


def _facts(plan: "Plan") -> dict[str, str]:
    from ftrain.config.run_directory import flatten

    return {key: repr(value) for key, value in flatten(plan.resolved()).items()}
