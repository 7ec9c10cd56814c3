"""Launchers of parallel programs, such as mpirun and torchrun, and the variables that they set.

The variables give the rank of this process, the number of processes, and the number on this host.
None of them reliably gives the address of process 0. So processes of one host connect to loopback,
at a port derived from the launcher's name for the job. On several hosts, FTRAIN_CHIEF must be the
address; without it no process trains, because each would be a run of its own in the same directory.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

CHIEF = "FTRAIN_CHIEF"
ALONE = "FTRAIN_PROCESSES"  # 1: each process trains alone
_FIRST_PORT = 61440  # above the ports that Linux gives to clients
_PORTS = 4096


class Launcher(NamedTuple):
    """The variables by which a launcher identifies a process; each may be unset."""

    name: str
    rank: str
    size: str
    local_size: str
    job: tuple[str, ...]  # variables that differ between two jobs on one host at the same time
    hint: str  # how to set a variable for all processes


LAUNCHERS = (
    Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "mpirun -x FTRAIN_CHIEF=HOST:8476",
    ),
    Launcher(
        "mpirun (MVAPICH2)",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        (),
        "mpirun -env FTRAIN_CHIEF HOST:8476",
    ),
    Launcher(
        "mpiexec (MPICH, Intel MPI)",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALNRANKS",
        (),
        "mpiexec -genv FTRAIN_CHIEF HOST:8476",
    ),
    Launcher(
        "flux run",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "",
        ("FLUX_JOB_ID",),
        "flux run --env=FTRAIN_CHIEF=HOST:8476",
    ),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "",
        (),
        "jsrun -E FTRAIN_CHIEF=HOST:8476",
    ),
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID", "MASTER_PORT"),
        "export FTRAIN_CHIEF=HOST:8476",
    ),
)


@dataclass(frozen=True)
class Rank:
    """One of several processes of a launcher; `chief` is the address of process 0."""

    launcher: str
    index: int
    count: int
    chief: str
    is_one_host: bool


def find_rank(environ: Mapping[str, str], slurm: tuple[int, int] | None = None) -> Rank | None:
    """Return the rank of this process, or None if no such launcher has started several.

    `slurm` is the rank and size of this process in its SLURM step. If they are equal to the
    launcher's, SLURM decides, because `srun --mpi=pmi2` sets these variables too. If they differ,
    mpirun has used srun to start its own daemons. ValueError names the variable to set.
    """
    for launcher in LAUNCHERS:
        index, count = (_number(environ, variable) for variable in (launcher.rank, launcher.size))
        if index is None or count is None or count < 2 or (index, count) == slurm:
            continue
        if index >= count:
            raise ValueError(
                f"{launcher.rank} is {index}, expected less than {launcher.size}, which is {count}"
            )
        return _place(launcher, index, count, environ)
    lone = _number(environ, "PMIX_RANK")
    is_known = slurm is not None or any(
        _number(environ, launcher.size) is not None for launcher in LAUNCHERS
    )
    if lone and not is_known and "SLURM_STEP_ID" not in environ:
        raise ValueError(
            f"PMIX_RANK is {lone}, so a launcher has started several processes, "
            f"but their number is not known; name them in FTRAIN_CLUSTER, {_alone('')}"
        )
    return None


def _place(launcher: Launcher, index: int, count: int, environ: Mapping[str, str]) -> Rank:
    local = _number(environ, launcher.local_size)
    is_one_host = local == count
    chief = environ.get(CHIEF, "").strip()
    job = [environ[variable] for variable in launcher.job if environ.get(variable, "").strip()]
    if not chief and is_one_host and job:
        digest = hashlib.blake2b("/".join(job).encode(errors="replace"), digest_size=4).digest()
        chief = f"127.0.0.1:{_FIRST_PORT + int.from_bytes(digest) % _PORTS}"
    if not chief:
        raise ValueError(
            f"{launcher.name} has started this as process {index} of {count} ({launcher.size}), "
            f"but does not give the address of process 0: set {CHIEF} to its host and a free port "
            f"({launcher.hint}), {_alone(launcher.size)}"
        )
    return Rank(launcher.name, index, count, chief, is_one_host)


def _alone(size: str) -> str:
    stray = f"; unset {size} if it was left over" if size == "WORLD_SIZE" else ""
    return f"or set {ALONE}=1 to make each process a run of its own{stray}"


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "").strip() if variable else ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
