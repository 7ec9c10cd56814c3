"""The jobs of a cluster with the addresses of their tasks, and how they are written: JSON, TOML, ClusterDef."""

import json
import re
import reprlib
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import tomli_w

from ftrain.cluster.addresses import Address, parse_address
from ftrain.paths import expanded

_MAX_LIST = 1 << 20  # addresses in the list of a job with gaps
_INT32 = range(-(2**31), 2**31)  # what a ClusterDef holds as the index of a task
_FIRST_JOBS = ("chief", "master", "worker")
_IDLE_JOBS = ("ps", "evaluator")
_ESCAPES = {"\\": r"\\", '"': r"\"", "'": r"\'", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


class ClusterSpec:
    """Jobs by name, each with tasks at addresses such as "node1:2222".

    It is made from lists of addresses, from dicts of index to address where a job has gaps, from another ClusterSpec,
    or from a ClusterDef: the message, or the same as a dict, {"job": [{"name": "worker", "tasks": {"0": "a:2222"}}]}.
    Names and addresses in bytes come back as bytes; everything written is text.

    >>> spec = ClusterSpec({"worker": ["a:2222", "b:2222"], "ps": {1: "c:2222"}})
    >>> spec
    ClusterSpec({'ps': {1: 'c:2222'}, 'worker': ['a:2222', 'b:2222']})
    >>> spec.task_address("worker", 1)
    'b:2222'
    """

    def __init__(self, cluster: Any) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_cluster_def()
        elif _is_message(cluster):
            jobs = [{"name": job.name, "tasks": dict(job.tasks)} for job in cluster.job]
            cluster = {"job": jobs} if jobs else {}
        if not isinstance(cluster, dict):
            raise TypeError(
                "`cluster` must be a dictionary mapping one or more job names to lists of network addresses, "
                "or a `ClusterDef` protocol buffer"
            )
        jobs = _jobs_of_definition(cluster["job"]) if _is_definition(cluster) else cluster
        self._jobs = {name: _numbered(name, tasks) for name, tasks in jobs.items()}
        _check_types(self._jobs)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        """Equal to a spec, or to a dict of dicts, with the same jobs and tasks."""
        return self._jobs == (other._jobs if isinstance(other, ClusterSpec) else other)

    def __repr__(self) -> str:
        jobs = self.as_dict()
        return f"ClusterSpec({dict(sorted(jobs.items(), key=lambda job: job[0]))!r})"

    @property
    def jobs(self) -> list[str]:
        return list(self._jobs)

    def num_tasks(self, job: str) -> int:
        return len(self._tasks(job))

    def task_indices(self, job: str) -> list[int]:
        return sorted(self._tasks(job))

    def task_address(self, job: str, index: int) -> str:
        tasks = self._tasks(job)
        if index not in tasks:
            raise ValueError(f"No task with index {index!r} in job {job!r}")
        return tasks[index]

    def job_tasks(self, job: str) -> list[str | None]:
        """The addresses by index, with None for the indices that a job leaves out."""
        tasks = self._tasks(job)
        if not tasks:
            raise ValueError(
                f"job {job!r} has no tasks and therefore no list of addresses; ask num_tasks() before"
            )
        if max(tasks) >= _MAX_LIST:
            raise ValueError(
                f"job {job!r} has a task {max(tasks)}, and a list up to it would be longer than {_MAX_LIST}; "
                "use task_indices() and task_address()"
            )
        addresses: list[str | None] = [None] * (max(tasks) + 1)
        for index, address in tasks.items():
            if index < -len(addresses):
                raise IndexError(
                    f"job {job!r} has a task {index}, which no list can hold; use task_address()"
                )
            addresses[index] = address  # a negative index counts from the end, as in the reference
        return addresses

    def as_dict(self) -> dict[str, list[str | None] | dict[int, str]]:
        """The jobs with their tasks: as a list if the indices are dense, else as a dict."""
        return {job: self._listed(job) for job in self._jobs}

    def as_cluster_def(self) -> dict[str, Any]:
        """The JSON form of a ClusterDef, with jobs and tasks in order; {} without jobs."""
        jobs = [
            {"name": job, "tasks": {str(i): tasks[i] for i in sorted(tasks)}}
            for job, tasks in _written(self)
        ]
        return {"job": jobs} if jobs else {}

    def as_cluster_def_text(self) -> str:
        """A ClusterDef in protobuf's text format."""
        return "".join(_job_text(job, tasks) for job, tasks in _written(self))

    def to_json(self) -> str:
        return json.dumps(_document(self), indent=2)

    def to_toml(self) -> str:
        return tomli_w.dumps(_document(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The spec that `to_json` wrote, or a ClusterDef as JSON."""
        return cls(
            _checked(
                _parsed(
                    text, "JSON", lambda text: json.loads(text, object_pairs_hook=_without_repeats)
                )
            )
        )

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """One key to a job: worker = ["a:2222", "b:2222"], or a table of indices where there are gaps."""
        return cls(_checked(_parsed(text, "TOML", tomllib.loads)))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A spec from a .toml or a .json file."""
        path = Path(expanded(path))
        readers = {".toml": cls.from_toml, ".json": cls.from_json}
        reader = readers.get(path.suffix)
        if reader is None:
            raise ValueError(f"{path}: the file of a cluster ends in .toml or .json")
        try:
            return reader(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _tasks(self, job: str) -> dict[int, str]:
        if job not in self._jobs:
            raise ValueError(f"No such job in cluster: {job!r}")
        return self._jobs[job]

    def _listed(self, job: str) -> list[str | None] | dict[int, str]:
        tasks = self._jobs[job]
        seems_dense = bool(tasks) and max(tasks) + 1 == len(tasks)
        return self.job_tasks(job) if seems_dense else dict(sorted(tasks.items()))


def processes(spec: ClusterSpec) -> list[tuple[str, int, str]]:
    """The processes that train, as (job, index, address) in the order of their process ids; the first coordinates.

    Jobs "chief" and "master" come first, then "worker", then any others by name. Jobs "ps" and "evaluator" train
    nothing here: the devices of the mesh hold the parameters, and `ftrain eval RUN --follow` evaluates by itself.
    """
    jobs = ClusterSpec(spec)  # a copy is all text
    found = [
        (job, index, jobs.task_address(job, index))
        for job in _training_jobs(jobs)
        for index in jobs.task_indices(job)
    ]
    if not found:
        raise ValueError(
            f'none of the jobs {jobs.jobs} has a process that trains; add worker = ["node1:2222"]'
        )
    return found


def check_usable(spec: ClusterSpec) -> None:
    """Raise ValueError unless processes can be started from this: real addresses, each once, and no gaps."""
    jobs, seen = ClusterSpec(spec), dict[Address, str]()
    for job in jobs.jobs:
        for index in jobs.task_indices(job):
            task, address = f"{job}:{index}", jobs.task_address(job, index)
            place = _place_of(task, address)
            if place in seen:
                raise ValueError(
                    f"tasks {seen[place]} and {task} both have the address {address}; give each its own"
                )
            seen[place] = task
    for job in _training_jobs(jobs):
        indices = jobs.task_indices(job)
        if indices != list(range(len(indices))):
            raise ValueError(
                f"job {job!r} has the tasks {indices}, but {len(indices)} tasks are numbered from 0"
            )


def _place_of(task: str, address: str) -> Address:
    if unfit := re.search(r"[^A-Za-z0-9._:%\[\]-]", address):
        raise ValueError(
            f"task {task}: the address {address!r} has a {unfit[0]!r} in it; wanted such as node1:2222"
        )
    try:
        place = parse_address(address)
    except ValueError as error:
        raise ValueError(f"task {task}: {error}") from None
    return Address(place.host.lower(), place.port)


def _training_jobs(spec: ClusterSpec) -> list[str]:
    first = [job for job in _FIRST_JOBS if job in spec.jobs]
    return first + sorted(set(spec.jobs) - {*_FIRST_JOBS, *_IDLE_JOBS})


def _is_message(cluster: Any) -> bool:
    """Whether this is a ClusterDef message, TensorFlow's or tensorboard's: there is more than one class of it."""
    return getattr(getattr(cluster, "DESCRIPTOR", None), "name", None) == "ClusterDef"


def _is_definition(cluster: dict[Any, Any]) -> bool:
    """Whether this is a ClusterDef as a dict; a job of the name "job" has addresses in its list, which are text."""
    jobs = cluster.get("job")
    return (
        len(cluster) == 1
        and isinstance(jobs, list)
        and bool(jobs)
        and all(isinstance(job, dict) for job in jobs)
    )


def _jobs_of_definition(definition: list[dict[str, Any]]) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for number, job in enumerate(definition):
        if unknown := job.keys() - {"name", "tasks"}:
            raise ValueError(
                f"job[{number}] of the ClusterDef has {sorted(unknown, key=str)}; wanted name and tasks"
            )
        name, tasks = job.get("name", ""), job.get("tasks", {})
        if not isinstance(name, str) or not isinstance(tasks, dict):
            raise ValueError(
                f"job[{number}] of the ClusterDef is {reprlib.repr(job)}; wanted a name, and tasks as index: address"
            )
        if name in jobs:
            raise ValueError(
                f"job[{number}] of the ClusterDef has the name {name!r} of a job before it"
            )
        jobs[name] = tasks
    return jobs


def _numbered(job: Any, tasks: Any) -> dict[int, Any]:
    if isinstance(tasks, list | tuple):
        return dict(enumerate(tasks))
    if not isinstance(tasks, dict):
        raise TypeError(
            f"The tasks for job {job!r} must be a list or a dictionary from integers to strings."
        )
    return {_as_index(index, job): address for index, address in tasks.items()}


def _as_index(index: Any, job: Any) -> int:
    try:
        return int(index)
    except (TypeError, ValueError, OverflowError) as error:
        raise type(error)(
            f"the index {index!r} of a task of job {job!r} is not a whole number"
        ) from None


def _check_types(jobs: dict[Any, dict[int, Any]]) -> None:
    if len({type(name) for name in jobs}) > 1:
        raise TypeError(f"the job names {list(jobs)} are of several types; write them all as text")
    for name, tasks in sorted(jobs.items(), key=lambda job: _as_text(job[0], "Job name")):
        for index, address in sorted(tasks.items()):
            _as_text(address, "Task address")
            if index not in _INT32:
                raise ValueError(
                    f"task index {index} of job {name!r} is out of range; a ClusterDef has 32 bits for it"
                )


def _as_text(value: Any, what: str) -> str:
    if isinstance(value, bytes | bytearray):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} {value!r} must be bytes or unicode")
    return (
        value.encode().decode()
    )  # refuses halves of surrogate pairs, which no file or message can hold


def _written(spec: ClusterSpec) -> Iterator[tuple[str, dict[int, str]]]:
    """The jobs by name, all in text."""
    for job in sorted(spec.jobs):
        addresses = {
            i: _as_text(spec.task_address(job, i), "Task address") for i in spec.task_indices(job)
        }
        yield _as_text(job, "Job name"), addresses


def _document(spec: ClusterSpec) -> dict[str, Any]:
    """The jobs for a file: lists where the tasks have the numbers of a list, else dicts."""
    return {
        job: list(tasks.values())
        if list(tasks) == list(range(len(tasks)))
        else {str(i): tasks[i] for i in tasks}
        for job, tasks in _written(spec)
    }


def _job_text(job: str, tasks: dict[int, str]) -> str:
    name = f'  name: "{_escaped(job)}"\n' if job else ""
    in_order = sorted(
        tasks, key=lambda index: index % 2**32
    )  # protobuf's order: negative numbers come last
    entries = (
        f'  tasks {{\n    key: {i}\n    value: "{_escaped(tasks[i])}"\n  }}\n' for i in in_order
    )
    return f"job {{\n{name}{''.join(entries)}}}\n"


def _escaped(text: str) -> str:
    return "".join(
        _ESCAPES.get(c) or (f"\\{ord(c):03o}" if c < " " or c == "\x7f" else c) for c in text
    )


def _parsed(text: str, form: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid {form}: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)!r} stands there twice"
        )
    return found


def _checked(document: Any) -> dict[str, Any]:
    """What a file holds, if jobs can be made of it; else a ValueError that names the key."""
    wanted = 'wanted addresses such as "node1:2222", in a list or by index'
    if not isinstance(document, dict):
        raise ValueError(f"found {reprlib.repr(document)}; {wanted}, under the names of jobs")
    jobs = _jobs_of_definition(document["job"]) if _is_definition(document) else document
    for job, tasks in jobs.items():
        if not isinstance(tasks, list | dict):
            raise ValueError(f"{job}: found {reprlib.repr(tasks)}; {wanted}")
        for index, address in tasks.items() if isinstance(tasks, dict) else enumerate(tasks):
            if not re.fullmatch(r"0|-?[1-9][0-9]{0,9}", str(index)) or int(index) not in _INT32:
                raise ValueError(
                    f"{job}.{index}: the index of a task is a whole number such as 0 or 12"
                )
            if not isinstance(address, str):
                raise ValueError(
                    f'{job}.{index}: found {reprlib.repr(address)}; wanted an address such as "node1:2222"'
                )
    return jobs
