"""The cluster spec: jobs with the addresses of their tasks, as JSON, TOML or ClusterDef."""

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
_INT32 = range(-(2**31), 2**31)  # the task index of a ClusterDef
_FIRST_JOBS = ("chief", "master", "worker")
_IDLE_JOBS = ("ps", "evaluator")
_ESCAPES = {"\\": r"\\", '"': r"\"", "'": r"\'", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


class ClusterSpec:
    """Jobs by name, each with tasks at addresses such as "node1:2222".

    The argument is a dict of jobs: lists of addresses, or dicts of index to address where a job has
    gaps. It can also be another ClusterSpec, or a ClusterDef: the message, or the same as a dict,
    {"job": [{"name": "worker", "tasks": {"0": "a:2222"}}]}. Names and addresses in bytes stay
    bytes; everything written is text.

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
                "`cluster` must be a dictionary mapping one or more job names to lists of "
                "network addresses, or a `ClusterDef` protocol buffer"
            )
        jobs = _jobs_of_definition(cluster["job"]) if _is_definition(cluster) else cluster
        self._jobs = {name: _numbered(name, tasks) for name, tasks in jobs.items()}
        _check_types(self._jobs)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        """True for a spec, or a dict of dicts, with the same jobs and tasks."""
        return self._jobs == (other._jobs if isinstance(other, ClusterSpec) else other)

    def __repr__(self) -> str:
        jobs = self.as_dict()
        return f"ClusterSpec({dict(sorted(jobs.items(), key=lambda job: job[0]))!r})"

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job: str) -> int:
        """Return the number of tasks of a job."""
        return len(self._tasks(job))

    def task_indices(self, job: str) -> list[int]:
        """Return the indices of the tasks of a job, in order."""
        return sorted(self._tasks(job))

    def task_address(self, job: str, index: int) -> str:
        """Return the address of a task."""
        tasks = self._tasks(job)
        if index not in tasks:
            raise ValueError(f"No task with index {index!r} in job {job!r}")
        return tasks[index]

    def job_tasks(self, job: str) -> list[str | None]:
        """Return the addresses by index, with None for missing indices."""
        tasks = self._tasks(job)
        if not tasks:
            raise ValueError(
                f"job {job!r} has no tasks and therefore no list of addresses; check num_tasks()"
            )
        if max(tasks) >= _MAX_LIST:
            raise ValueError(
                f"job {job!r} has a task {max(tasks)}, and a list up to it would be longer than "
                f"{_MAX_LIST}; use task_indices() and task_address()"
            )
        addresses: list[str | None] = [None] * (max(tasks) + 1)
        for index, address in tasks.items():
            if index < -len(addresses):
                raise IndexError(
                    f"job {job!r} has the task index {index}, before the start of its list of "
                    f"{len(addresses)}; use task_address()"
                )
            addresses[index] = address  # a negative index counts from the end, as in TensorFlow 1
        return addresses

    def as_dict(self) -> dict[str, list[str | None] | dict[int, str]]:
        """Return the jobs with their tasks: a list if the indices are dense, else a dict."""
        return {job: self._listed(job) for job in self._jobs}

    def as_cluster_def(self) -> dict[str, Any]:
        """Return the JSON form of a ClusterDef, with jobs and tasks in order; {} without jobs."""
        jobs = [
            {"name": job, "tasks": {str(i): tasks[i] for i in sorted(tasks)}}
            for job, tasks in _written(self)
        ]
        return {"job": jobs} if jobs else {}

    def as_cluster_def_text(self) -> str:
        """Return a ClusterDef in protobuf's text format."""
        return "".join(_job_text(job, tasks) for job, tasks in _written(self))

    def to_json(self) -> str:
        """Return the jobs as JSON."""
        return json.dumps(_document(self), indent=2)

    def to_toml(self) -> str:
        """Return the jobs as TOML."""
        return tomli_w.dumps(_document(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of `to_json`, or a ClusterDef as JSON."""

        def parse(text: str) -> Any:
            return json.loads(text, object_pairs_hook=_without_repeats)

        return cls(_checked(_parsed(text, "JSON", parse)))

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Parse one key per job: worker = ["a:2222", "b:2222"], or a table of indices."""
        return cls(_checked(_parsed(text, "TOML", tomllib.loads)))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a .toml or a .json file."""
        path = Path(expanded(path))
        readers = {".toml": cls.from_toml, ".json": cls.from_json}
        reader = readers.get(path.suffix)
        if reader is None:
            raise ValueError(f"{path}: the file of a cluster must end in .toml or .json")
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
    """Return the processes that train as (job, index, address), in the order of their process ids.

    Jobs "chief" and "master" come first, then "worker", then any others by name. The first process
    is the coordinator. Jobs "ps" and "evaluator" do not train here: the devices of the mesh hold
    the parameters, and `ftrain eval RUN --follow` needs no cluster.
    """
    jobs = ClusterSpec(spec)  # a copy, which has text only
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
    """Raise ValueError unless the spec has valid addresses, each once, and no gaps."""
    jobs = ClusterSpec(spec)
    seen: dict[Address, str] = {}
    for job in jobs.jobs:
        for index in jobs.task_indices(job):
            task = f"{job}:{index}"
            address = jobs.task_address(job, index)
            place = _place_of(task, address)
            if place in seen:
                raise ValueError(
                    f"tasks {seen[place]} and {task} both have the address {address}; "
                    "give each its own"
                )
            seen[place] = task
    for job in _training_jobs(jobs):
        indices = jobs.task_indices(job)
        if indices != list(range(len(indices))):
            raise ValueError(
                f"job {job!r} has the tasks {indices}, but {len(indices)} tasks are numbered from 0"
            )


def _place_of(task: str, address: str) -> Address:
    if invalid := re.search(r"[^A-Za-z0-9._:%\[\]-]", address):
        raise ValueError(
            f"task {task}: the address {address!r} has a {invalid[0]!r} in it; "
            "expected for example node1:2222"
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
    """True for a ClusterDef message; TensorFlow and tensorboard have a class of it each."""
    return getattr(getattr(cluster, "DESCRIPTOR", None), "name", None) == "ClusterDef"


def _is_definition(cluster: dict[Any, Any]) -> bool:
    """True for a ClusterDef as a dict; a job named "job" has a list of text instead."""
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
                f"job[{number}] of the ClusterDef has unknown keys {sorted(unknown, key=str)}; "
                "expected only name and tasks"
            )
        name = job.get("name", "")
        tasks = job.get("tasks", {})
        if not isinstance(name, str) or not isinstance(tasks, dict):
            raise ValueError(
                f"job[{number}] of the ClusterDef is {reprlib.repr(job)}; "
                "expected a name, and tasks as index: address"
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
                    f"task index {index} of job {name!r} is out of range; "
                    "a ClusterDef has 32 bits for it"
                )


def _as_text(value: Any, what: str) -> str:
    if isinstance(value, bytes | bytearray):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} {value!r} must be bytes or unicode")
    return value.encode().decode()  # raises for lone surrogates, which no file can hold


def _written(spec: ClusterSpec) -> Iterator[tuple[str, dict[int, str]]]:
    """Yield the jobs by name, as text."""
    for job in sorted(spec.jobs):
        addresses = {
            i: _as_text(spec.task_address(job, i), "Task address") for i in spec.task_indices(job)
        }
        yield _as_text(job, "Job name"), addresses


def _document(spec: ClusterSpec) -> dict[str, Any]:
    """Return the jobs for a file: lists if the indices are 0, 1 and so on, else dicts."""
    return {
        job: list(tasks.values())
        if list(tasks) == list(range(len(tasks)))
        else {str(i): tasks[i] for i in tasks}
        for job, tasks in _written(spec)
    }


def _job_text(job: str, tasks: dict[int, str]) -> str:
    name = f'  name: "{_escaped(job)}"\n' if job else ""
    in_order = sorted(tasks, key=lambda index: index % 2**32)  # as protobuf: negative ones last
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
            f"the key {next(name for name in names if names.count(name) > 1)!r} is given twice"
        )
    return found


def _checked(document: Any) -> dict[str, Any]:
    """Return the jobs of a document; ValueError names an invalid key."""
    expected = 'expected addresses such as "node1:2222", in a list or by index'
    if not isinstance(document, dict):
        raise ValueError(f"found {reprlib.repr(document)}; {expected}, under the names of jobs")
    jobs = _jobs_of_definition(document["job"]) if _is_definition(document) else document
    for job, tasks in jobs.items():
        if not isinstance(tasks, list | dict):
            raise ValueError(f"{job}: found {reprlib.repr(tasks)}; {expected}")
        for index, address in tasks.items() if isinstance(tasks, dict) else enumerate(tasks):
            if not re.fullmatch(r"0|-?[1-9][0-9]{0,9}", str(index)) or int(index) not in _INT32:
                raise ValueError(
                    f"{job}.{index}: the index of a task must be a whole number such as 0 or 12"
                )
            if not isinstance(address, str):
                raise ValueError(
                    f"{job}.{index}: found {reprlib.repr(address)}; "
                    'expected an address such as "node1:2222"'
                )
    return jobs
