"""Joining: how `ftrain train` becomes one process among others, if it is."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ftrain.cli.exit_codes import exit_code
from ftrain.storage import is_transient

if TYPE_CHECKING:
    from ftrain.cluster import Company
    from ftrain.config import Job
    from ftrain.config.plan import Plan
    from ftrain.launching.reporter import Reporter
    from ftrain.training import Hook

BUILDING = 600.0  # seconds in which the first process has to have its data ready, which it may have to write


def join(plan: "Plan", cluster: Path | None, task: str | None) -> "Company":
    """This process among those of its job, as the command line or the environment says; else on its own."""
    from ftrain.cluster import ClusterError, connect, create_local
    from ftrain.cluster.environment import membership
    from ftrain.config.load import ConfigError
    from ftrain.launching.contract import HANG_TIMEOUT

    environ = dict(os.environ)
    if cluster is None and task is not None:
        raise ConfigError("--task needs --cluster FILE, which names the processes of the job")
    if environ.get("FTRAIN_CLUSTER") == "auto":
        raise ConfigError(
            "FTRAIN_CLUSTER=auto: name the processes instead, by --cluster FILE --task worker:0, or JSON"
        )
    if cluster is not None:
        environ |= {
            "FTRAIN_CLUSTER": f"@{cluster}",
            "FTRAIN_TASK": task or environ.get("FTRAIN_TASK", ""),
        }
    limits = plan.calls["cluster"].arguments
    try:
        member = membership(environ)
        if member is None:
            return create_local()
        return connect(
            member.spec,
            member.job,
            member.index,
            limit=limits["connect_timeout"],
            heartbeat=_heartbeat(
                float(environ.get(HANG_TIMEOUT, 0)) or limits["hang_timeout"] or None
            ),
            facts=_facts(plan),
            directory=plan.calls["run"].arguments["directory"],
        )
    except ClusterError:
        raise
    except (ValueError, OSError) as error:
        if is_transient(error):
            raise
        reason = str(error)
        if cluster is not None:  # in the words of whoever typed it
            reason = reason.replace("FTRAIN_CLUSTER", "--cluster").replace("FTRAIN_TASK", "--task")
        raise ConfigError(f"the cluster cannot be joined: {reason}") from None


def _heartbeat(hang_timeout: float | None) -> float:
    """Seconds of patience for the runtime, which ends a process without a word: whoever can tell who hangs is first."""
    return 100.0 if hang_timeout is None else 2 * hang_timeout + 10


class StopRequests:
    """Requests to stop, which may come before there is a run that could be stopped."""

    def __init__(self) -> None:
        self._early: list[str] = []
        self._stop: Callable[[str], None] = self._early.append
        self._changing = threading.Lock()

    def ask(self, reason: str) -> None:
        with self._changing:
            self._stop(reason)

    def pass_on(self, stop: Callable[[str], None]) -> None:
        """From now on `stop` is called, and at once if it should have been."""
        with self._changing:
            self._stop = stop
            for reason in self._early[:1]:
                stop(reason)


@contextmanager
def watched(reporter: "Reporter", company: "Company") -> Iterator[None]:
    """While this is entered, the supervisor is told why another process ends this one."""
    from ftrain.launching.contract import Failed

    company.tell_end = lambda why, process: reporter.say(Failed("PeerFailed", why, because=process))
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        company.exit_code = 130 if isinstance(error, KeyboardInterrupt) else exit_code(error) or 1
        raise
    finally:
        reporter.close()


def build_in_turn(plan: "Plan", company: "Company") -> "Job":
    """The job, built by the first process before the others: it may have to write the data that they read."""
    from ftrain.config import build

    job = build(plan) if company.is_chief else None
    company.barrier("the first process has built the job", BUILDING)
    job = job or build(plan)
    _check_after_failure(job)
    return job


@contextmanager
def claim_together(job: "Job", company: "Company", accept_changes: bool) -> Iterator[None]:
    """The run directory, claimed by the first process for all."""
    from ftrain.config import claim

    resolved = job.plan.resolved()
    with (
        claim(job.directory, resolved, accept_changes=accept_changes)
        if company.is_chief
        else nullcontext()
    ):
        company.barrier("the run directory", BUILDING)
        yield


def faults_of(directory: Path, rank: int) -> "list[Hook]":
    """The faults that whoever started this process wants to see it survive."""
    from ftrain.hooks import Faults
    from ftrain.launching import contract, parse_faults

    text = os.environ.get(contract.INJECT)
    if not text:
        return []
    note = directory / f"faults_{rank}.txt"
    if os.environ.get(contract.ATTEMPT, "0") == "0":
        note.unlink(missing_ok=True)
    return [Faults(parse_faults(text), rank, note)]


def _check_after_failure(job: "Job") -> None:
    """The config must also fit the processes of a restart, as far as that can be known now."""
    import jax

    from ftrain.cluster.mesh import AXES, check_processes
    from ftrain.config.load import ConfigError
    from ftrain.launching.contract import AFTER_FAILURE

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
            f"--processes-after-failure {text}: a restart with {text} processes of {each} device(s) would fail: {error}"
        ) from None


def _facts(plan: "Plan") -> dict[str, str]:
    from ftrain.config.run_directory import flatten

    return {key: repr(value) for key, value in flatten(plan.resolved()).items()}
