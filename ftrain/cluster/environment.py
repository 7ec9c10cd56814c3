"""Which process of a job this one is, according to the environment variables of its launcher."""

import json
import os
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftrain.cluster.addresses import parse_address
from ftrain.cluster.parallel_launchers import Rank, find_rank
from ftrain.cluster.spec import ClusterSpec, check_usable, processes
from ftrain.storage import raise_if_transient

Environment = Mapping[str, str]
_MAX_PROCESSES = 100_000  # a larger number is a mistake, and would exhaust the memory
_REPLACED = {
    "ps": "parameter servers are not needed: the mesh holds the parameters, "
    "so start only the chief and the workers",
    "evaluator": "start `ftrain eval RUN --follow` instead, which needs no cluster",
}
_NODES = r"(?:[A-Za-z0-9._-]|\[[0-9,-]+\])+"  # one pattern of a node list
_STEP_PORTS = 257  # ports between those of two steps of one job
# SLURM's step ids for an interactive shell and a batch script.
_WITHOUT_SRUN = ("", "4294967290", "4294967291")


@dataclass(frozen=True)
class Membership:
    """A process of a job: task `index` of `job`, one of the `processes` of the spec."""

    spec: ClusterSpec
    job: str
    index: int
    source: str  # the environment variable or launcher that it was read from

    def __post_init__(self) -> None:
        if self.job in _REPLACED:
            raise ValueError(
                f"{self.source}: this process is {self.job}:{self.index}; {_REPLACED[self.job]}"
            )
        try:
            check_usable(self.spec)
            members = [(job, index) for job, index, _ in processes(self.spec)]
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from None
        if (self.job, self.index) not in members:
            counts = Counter(job for job, _ in members)
            raise ValueError(
                f"{self.source}: this process is {self.job}:{self.index}, "
                "which the cluster does not have; "
                f"it has {', '.join(f'{job} 0 to {count - 1}' for job, count in counts.items())}"
            )

    @property
    def process_id(self) -> int:
        """The index of this process among all that train."""
        return [(job, index) for job, index, _ in processes(self.spec)].index(
            (self.job, self.index)
        )

    @property
    def process_count(self) -> int:
        """The number of processes that train."""
        return len(processes(self.spec))

    @property
    def is_chief(self) -> bool:
        """True for process 0."""
        return self.process_id == 0

    @property
    def coordinator(self) -> str:
        """The address that all processes connect to, which is the chief's."""
        return processes(self.spec)[0][2]


def membership(environ: Environment | None = None) -> Membership | None:
    """Return the place of this process in its job, or None if it trains alone.

    The first of these that is set decides:

    FTRAIN_CLUSTER  {"cluster": {"worker": ["a:2222"]}, "task": {"type": "worker", "index": 0}},
                    or @PATH of a .toml or .json file together with FTRAIN_TASK=worker:1; for
                    "auto" the result is None, so that the caller can let jax detect the cluster
    TF_CONFIG       the same JSON, as in TensorFlow
    FTRAIN_PROCESSES=1  it trains alone, even if a launcher has started other processes
    mpirun, torchrun    rank and size of more than one process; on several hosts with
                    FTRAIN_CHIEF=HOST:PORT, the address of process 0
    SLURM           a step of `srun` with more than one task, spread over its nodes in blocks
    Kubernetes      JOB_COMPLETION_INDEX of an Indexed Job, with FTRAIN_PROCESSES and FTRAIN_CHIEF
                    from its manifest

    ValueError names the variable if values contradict each other.
    """
    environ = os.environ if environ is None else environ
    if _is_set(environ, "FTRAIN_CLUSTER"):
        found = _read_ours(environ)
    elif _is_set(environ, "TF_CONFIG"):
        found = _read_tf_config(environ)
    elif environ.get("FTRAIN_PROCESSES", "").strip() == "1":
        found = None
    elif not _is_set(environ, "JOB_COMPLETION_INDEX") and (
        rank := find_rank(environ, _slurm_place(environ))
    ):
        found = _read_rank(rank)
    elif _is_in_slurm_step(environ):
        found = _read_slurm(environ)
    elif _is_set(environ, "FTRAIN_PROCESSES") or _is_set(environ, "FTRAIN_CHIEF"):
        found = _read_kubernetes(environ)
    else:
        found = None
    return found if found and found.process_count > 1 else None


def expand_nodes(text: str) -> list[str]:
    """Return the node names of a compressed list of SLURM.

    >>> expand_nodes("node[01-02,07],login1,gpu[1-2]-ib")
    ['node01', 'node02', 'node07', 'login1', 'gpu1-ib', 'gpu2-ib']
    """
    if not re.fullmatch(f"{_NODES}(,{_NODES})*", text):
        raise ValueError(
            f"{_short(text)} is not a node list; expected for example node[01-03,07],login1"
        )
    names: list[str] = []
    for pattern in re.findall(_NODES, text):
        names += _expand_pattern(pattern, text)
        _check_count(len(names), text)
    return names


def _is_set(environ: Environment, variable: str) -> bool:
    return bool(environ.get(variable, "").strip())


def _read_ours(environ: Environment) -> Membership | None:
    value = environ["FTRAIN_CLUSTER"].strip()
    task = environ.get("FTRAIN_TASK", "").strip()
    if value == "auto":
        return None
    if value.startswith("@"):
        return Membership(_load(value[1:]), *_parse_task(task), "FTRAIN_CLUSTER")
    if not value.startswith("{"):
        raise ValueError(
            f"FTRAIN_CLUSTER is {_short(value)}; "
            "expected auto, @PATH of a .toml or .json file, or JSON such as "
            '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
        )
    described = _parse_json("FTRAIN_CLUSTER", value)
    spec = _cluster_of("FTRAIN_CLUSTER", described)
    if not spec:
        raise ValueError('FTRAIN_CLUSTER has no jobs under "cluster"')
    job, index = _task_of("FTRAIN_CLUSTER", described) if "task" in described else _parse_task(task)
    if task and (job, index) != _parse_task(task):
        raise ValueError(
            f"FTRAIN_TASK is {task}, but the task in FTRAIN_CLUSTER is {job}:{index}; "
            "set only one of them"
        )
    return Membership(spec, job, index, "FTRAIN_CLUSTER")


def _load(path: str) -> ClusterSpec:
    try:
        return ClusterSpec.load(path)
    except OSError as error:
        raise_if_transient(error, path)
        raise ValueError(f"FTRAIN_CLUSTER: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"FTRAIN_CLUSTER: {error}") from None


def _parse_task(text: str) -> tuple[str, int]:
    job, _, index = text.rpartition(":")
    if not job:
        raise ValueError(
            f"FTRAIN_TASK is {text!r}; "
            "expected the job and the index of this process, such as worker:1"
        )
    return job, _whole(index, "FTRAIN_TASK")


def _read_tf_config(environ: Environment) -> Membership | None:
    described = _parse_json("TF_CONFIG", environ["TF_CONFIG"])
    spec = _cluster_of("TF_CONFIG", described)
    tasks = sum(spec.num_tasks(job) for job in spec.jobs)
    if tasks == 0 or (tasks == 1 and "task" not in described):
        return None
    return Membership(spec, *_task_of("TF_CONFIG", described), "TF_CONFIG")


def _parse_json(variable: str, text: str) -> dict[str, Any]:
    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{variable} is not valid JSON: {error}") from None
    if not isinstance(described, dict):
        raise ValueError(
            f'{variable} is {_short(text)}; expected an object with "cluster" and "task"'
        )
    return described


def _cluster_of(variable: str, described: dict[str, Any]) -> ClusterSpec:
    try:
        return ClusterSpec.from_json(json.dumps(described.get("cluster", {})))
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{variable}: "cluster": {error}') from None


def _task_of(variable: str, described: dict[str, Any]) -> tuple[str, int]:
    task = described.get("task")
    job, index = (task.get("type"), task.get("index")) if isinstance(task, dict) else (None, None)
    if not isinstance(job, str) or not isinstance(index, int | str):
        raise ValueError(
            f'{variable} has {reprlib.repr(task)} as "task"; '
            'expected for example {"type": "worker", "index": 1}'
        )
    return job, _whole(str(index), f'{variable}: "index" of the task')


def _read_rank(rank: Rank) -> Membership:
    try:
        parse_address(rank.chief)
    except ValueError as error:
        raise ValueError(f"FTRAIN_CHIEF: {error}") from None
    if rank.count > _MAX_PROCESSES:
        raise ValueError(
            f"{rank.launcher} has {rank.count} processes; expected at most {_MAX_PROCESSES}"
        )
    host, _, port = rank.chief.rpartition(":")
    addresses = _pod_addresses(rank.chief, rank.count)
    if rank.is_one_host:  # only process 0 listens: the other ports are only names
        others = [each for each in range(1, rank.count + 1) if each != int(port)]
        addresses = [rank.chief, *(f"{host}:{each}" for each in others[: rank.count - 1])]
    return Membership(ClusterSpec({"worker": addresses}), "worker", rank.index, rank.launcher)


def _slurm_place(environ: Environment) -> tuple[int, int] | None:
    """Return the rank and the size of this process in its SLURM step, if it is in one."""
    if not _is_in_slurm_step(environ):
        return None
    return _whole(environ["SLURM_PROCID"], "SLURM_PROCID"), _slurm_tasks(environ)


def _is_in_slurm_step(environ: Environment) -> bool:
    if environ.get("SLURM_STEP_ID", "").strip() in _WITHOUT_SRUN:
        return False
    return (
        _is_set(environ, "SLURM_JOB_ID")
        and _is_set(environ, "SLURM_PROCID")
        and _slurm_tasks(environ) > 1
    )


def _slurm_step(environ: Environment) -> int:
    return _whole(environ["SLURM_STEP_ID"], "SLURM_STEP_ID")


def _slurm_tasks(environ: Environment) -> int:
    return _whole(*_first_of(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))


def _read_slurm(environ: Environment) -> Membership:
    count = _slurm_tasks(environ)
    nodes, nodes_variable = _first_of(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
    layout, variable = _first_of(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    try:
        hosts = expand_nodes(nodes)
    except ValueError as error:
        raise ValueError(f"{nodes_variable}: {error}") from None
    on_nodes = _tasks_per_node(layout, variable, len(hosts))
    if sum(on_nodes) != count:
        raise ValueError(
            f"{variable} is {_short(layout)}, {sum(on_nodes)} tasks, but the step has {count}"
        )
    # In jax's range for SLURM. Steps of one job, and jobs with successive ids, may run on one node
    # at the same time, so they get different ports. The ports after the first are only names.
    first = _whole(environ["SLURM_JOB_ID"], "SLURM_JOB_ID") + _STEP_PORTS * _slurm_step(environ)
    ports = [[61440 + (first + local) % 4096 for local in range(tasks)] for tasks in on_nodes]
    addresses = [
        f"{host}:{port}" for host, taken in zip(hosts, ports, strict=True) for port in taken
    ]
    return Membership(
        ClusterSpec({"worker": addresses}),
        "worker",
        _whole(environ["SLURM_PROCID"], "SLURM_PROCID"),
        "SLURM",
    )


def _tasks_per_node(text: str, variable: str, nodes: int) -> list[int]:
    """Expand SLURM's tasks per node: "2(x3),1" becomes [2, 2, 2, 1]."""
    groups = [
        re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", group) for group in text.split(",")
    ]
    pairs = [(int(group[1]), int(group[2] or 1)) for group in groups if group]
    found = sum(times for _, times in pairs)
    if len(pairs) < len(groups) or sum(tasks * times for tasks, times in pairs) > _MAX_PROCESSES:
        raise ValueError(
            f"{variable} is {_short(text)}; expected the tasks on each node, such as 2(x3),1"
        )
    if found != nodes:
        raise ValueError(
            f"{variable} is {_short(text)}, which is for {found} nodes, but the node list has "
            f"{nodes}; set both as SLURM does, or set FTRAIN_CLUSTER"
        )
    return [tasks for tasks, times in pairs for _ in range(times)]


def _read_kubernetes(environ: Environment) -> Membership:
    count = _whole(*_first_of(environ, "FTRAIN_PROCESSES"))
    index = _whole(
        *_first_of(environ, "JOB_COMPLETION_INDEX", hint="give the Job completionMode: Indexed")
    )
    chief, variable = _first_of(environ, "FTRAIN_CHIEF")
    if not 1 <= count <= _MAX_PROCESSES:
        raise ValueError(
            f"FTRAIN_PROCESSES is {count}; expected the number of processes, 1 to {_MAX_PROCESSES}"
        )
    if index >= count:
        raise ValueError(
            f"JOB_COMPLETION_INDEX is {index}, but FTRAIN_PROCESSES is {count}; "
            "set it to the number of completions"
        )
    try:
        parse_address(chief)
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None
    return Membership(
        ClusterSpec({"worker": _pod_addresses(chief, count)}), "worker", index, "Kubernetes"
    )


def _pod_addresses(chief: str, count: int) -> list[str]:
    """Return the addresses of all pods; only the first is used, so the others may be invented."""
    host, _, port = chief.rpartition(":")
    label, dot, domain = host.partition(".")
    if label.endswith("-0"):
        return [f"{label[:-1]}{index}{dot}{domain}:{port}" for index in range(count)]
    return [chief, *(f"process-{index}.invalid:{port}" for index in range(1, count))]


def _first_of(
    environ: Environment, *variables: str, hint: str = "set it for every process"
) -> tuple[str, str]:
    """Return the value and the name of the first variable that is set."""
    for variable in variables:
        if _is_set(environ, variable):
            return environ[variable].strip(), variable
    raise ValueError(
        f"{' or '.join(variables)} is not set, but other variables of the job are; {hint}"
    )


def _whole(text: str, what: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()):
        raise ValueError(f"{what} is {_short(text)}; expected a whole number, 0 or more")
    return int(text)


def _expand_pattern(pattern: str, text: str) -> list[str]:
    """Return all names of "gpu[1-2]-ib"; the last of several brackets changes fastest."""
    names = [""]
    for place, part in enumerate(re.split(r"\[([^]]+)\]", pattern)):
        endings = _numbers(part, text) if place % 2 else [part]
        _check_count(len(names) * len(endings), text)
        names = [name + ending for name in names for ending in endings]
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        limits = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        first, last = (int(limits[1]), int(limits[2] or limits[1])) if limits else (1, 0)
        if limits is None or first > last:
            raise ValueError(
                f"{_short(part)} in the node list {_short(text)} is not a range; "
                "expected for example 01-03"
            )
        _check_count(len(found) + last + 1 - first, text)
        found += [f"{number:0{len(limits[1])}d}" for number in range(first, last + 1)]
    return found


def _check_count(nodes: int, text: str) -> None:
    if nodes > _MAX_PROCESSES:
        raise ValueError(f"the node list {_short(text)} has more than {_MAX_PROCESSES} nodes")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
