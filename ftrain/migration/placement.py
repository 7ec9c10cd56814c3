"""Where TensorFlow 1's replica_device_setter places operations on parameter servers.

ftrain does not train that way: a mesh of devices holds the parameters, and rules from their names
to its axes (`ftrain.cluster.Sharding`) split each of them. These functions compute which server
held which variable in a TF1 program, to read its checkpoints and logs.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, Self

STANDARD_PS_OPS = (
    "Variable",
    "VariableV2",
    "AutoReloadVariable",
    "MutableHashTable",
    "MutableHashTableV2",
    "MutableHashTableOfTensors",
    "MutableHashTableOfTensorsV2",
    "MutableDenseHashTable",
    "MutableDenseHashTableV2",
    "VarHandleOp",
    "BoostedTreesEnsembleResourceHandleOp",
    "BoostedTreesQuantileStreamResourceHandleOp",
    "ResourceConditionalAccumulator",
    "DecisionTreeResource",
)
_DEVICE_TYPES = ("CPU", "GPU", "TPU", "CUSTOM", "EPU")  # which do not need "device:" in front
_SIZELESS = ("string", "resource", "variant")  # count as no bytes in TF1


@dataclass(frozen=True)
class Operation:
    """The properties of an operation that decide its placement; by default it is a variable."""

    type: str = "VarHandleOp"
    shape: tuple[int, ...] = ()
    dtype: Any = "float32"
    device: str = ""  # requested by the program, perhaps only in part

    @property
    def nbytes(self) -> int:
        """The size of the output; ValueError if the shape is not known."""
        if any(not isinstance(size, Integral) or int(size) < 0 for size in self.shape):
            raise ValueError(
                f"the shape {self.shape} of a {self.type} is not known; "
                "expected whole numbers, 0 or more"
            )
        # Imported here, as `ftrain migrate` does not need them.
        import ml_dtypes  # noqa: F401 - it makes bfloat16 and its like known to numpy
        import numpy as np

        itemsize = 0 if str(self.dtype) in _SIZELESS else np.dtype(self.dtype).itemsize
        return math.prod(self.shape) * itemsize


# From operations and the number of tasks to a task for each operation.
Strategy = Callable[[Sequence[Operation], int], Sequence[int]]
Placement = Callable[[Sequence[Operation]], list[str]]


def round_robin(operations: Sequence[Operation], tasks: int) -> list[int]:
    """Place each operation on the next task in turn."""
    return [number % tasks for number in range(len(operations))]


def greedy_by_bytes(operations: Sequence[Operation], tasks: int) -> list[int]:
    """Place each operation on the task with the fewest bytes so far, the lowest of several.

    >>> greedy_by_bytes([Operation(shape=(size,)) for size in (100, 60, 30, 1)], 2)
    [0, 1, 1, 1]
    """
    loads = [0] * tasks
    chosen = []
    for operation in operations:
        chosen.append(loads.index(min(loads)))
        loads[chosen[-1]] += operation.nbytes
    return chosen


def loads_in_bytes(operations: Sequence[Operation], chosen: Sequence[int], tasks: int) -> list[int]:
    """Return the bytes on each task for a placement."""
    loads = [0] * tasks
    for operation, task in zip(operations, chosen, strict=True):
        loads[task] += operation.nbytes
    return loads


def replica_device_setter(
    *,
    ps_tasks: int = 0,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: Any = None,
    ps_ops: Collection[str] | None = None,
    ps_strategy: Strategy | None = None,
) -> Placement | None:
    """Return a function from operations, in the order of their creation, to their devices.

    Variables and tables (`ps_ops`) go to the task of `ps_device` that `ps_strategy` chooses, by
    default `round_robin`; the rest goes to `worker_device`. The device that an operation requests
    wins, field by field, or as a whole if `merge_devices` is false. The strategy does not see an
    operation that requests another job. `cluster` is a ClusterSpec or the argument of one; the
    tasks of its job of servers are then counted in place of `ps_tasks`. Without parameter servers
    the result is None.

    >>> place = replica_device_setter(ps_tasks=2, worker_device="/job:worker/task:7")
    >>> place([Operation(), Operation(device="/cpu:0"), Operation("MatMul"), Operation()])
    ['/job:ps/task:0', '/job:ps/task:1/device:CPU:0', '/job:worker/task:7', '/job:ps/task:0']
    """
    if cluster is not None:
        from ftrain.cluster.spec import ClusterSpec  # here, as it imports jax

        spec = cluster if isinstance(cluster, ClusterSpec) else ClusterSpec(cluster)
        job = _Device.parse(ps_device).job
        ps_tasks = spec.num_tasks(job) if job in spec.jobs else 0
    if ps_tasks < 0:
        raise ValueError(
            f"ps_tasks must be the number of parameter servers, or 0 for none, got {ps_tasks}"
        )
    if ps_tasks == 0:
        return None
    strategy = round_robin if ps_strategy is None else ps_strategy
    if not callable(strategy):
        raise TypeError("ps_strategy must be callable")
    on_servers = (
        frozenset(STANDARD_PS_OPS if ps_ops is None else ps_ops) if ps_device else frozenset()
    )
    return _Placer(
        _Device.parse(ps_device),
        _Device.parse(worker_device),
        on_servers,
        merge_devices,
        ps_tasks,
        strategy,
    )


@dataclass(frozen=True)
class _Placer:
    servers: "_Device"
    workers: "_Device"
    on_servers: frozenset[str]  # types of operations
    merge_devices: bool
    tasks: int
    strategy: Strategy

    def __call__(self, operations: Sequence[Operation]) -> list[str]:
        asked = [_Device.parse(operation.device) for operation in operations]
        numbered = [
            operation
            for operation, device in zip(operations, asked, strict=True)
            if self._has_task(operation, device)
        ]
        tasks = iter(self._chosen(numbered))
        return [
            str(self._place(operation, device, tasks))
            for operation, device in zip(operations, asked, strict=True)
        ]

    def _chosen(self, operations: list[Operation]) -> list[int]:
        chosen = list(self.strategy(operations, self.tasks))
        if len(chosen) != len(operations) or any(task not in range(self.tasks) for task in chosen):
            raise ValueError(
                f"ps_strategy chose {chosen} for {len(operations)} operations; "
                f"expected a task below {self.tasks} for each"
            )
        return chosen

    def _place(self, operation: Operation, asked: "_Device", tasks: Iterator[int]) -> "_Device":
        if operation.device and not self.merge_devices:
            return asked
        if self._has_task(operation, asked):
            return self.servers._replace(task=next(tasks)).merged(asked)
        return (self.servers if operation.type in self.on_servers else self.workers).merged(asked)

    def _has_task(self, operation: Operation, asked: "_Device") -> bool:
        """True if the strategy chooses its task: unless the operation requests another job."""
        is_free = self.merge_devices or not operation.device
        on_servers = bool(self.servers.job) and operation.type in self.on_servers
        return is_free and on_servers and asked.job in (None, "", self.servers.job)


class _Device(NamedTuple):
    """A device by the given parts of its name, such as /job:ps/task:1/device:CPU:0."""

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    type: str | None = None
    number: int | None = None

    @classmethod
    def parse(cls, name: str) -> Self:
        found: dict[str, Any] = {}
        for part in (name or "").split("/"):
            read = _parse_part(part.split(":"), name)
            if "type" in found and "type" in read:
                raise ValueError(
                    f"the device {name!r} has two types, {found['type']} and {read['type']}; "
                    "expected one"
                )
            found |= read
        return cls(**found)

    def merged(self, inner: Self) -> Self:
        """Return this device, with the parts of an inner one in place of its own."""
        return self._replace(
            **{field: value for field, value in inner._asdict().items() if value is not None}
        )

    def __str__(self) -> str:
        parts = [f"/{field}:{getattr(self, field)}" for field in ("job", "replica", "task")]
        parts.append(f"/device:{self.type}:{'*' if self.number is None else self.number}")
        return "".join(part for part, value in zip(parts, self, strict=False) if value is not None)


def _parse_part(words: list[str], name: str) -> dict[str, Any]:
    match words:
        case ["job", job]:
            return {"job": job}
        case ["replica" | "task" as field, number]:
            return {field: _number(number, name)}
        case [type] if type.upper() in _DEVICE_TYPES:
            return {"type": type.upper()}
        case [type, number] if type.upper() in _DEVICE_TYPES:
            return {"type": type.upper(), **_device_number(number, name)}
        case ["device", type, number]:
            return {
                "type": type.upper() if type in ("cpu", "gpu") else type,
                **_device_number(number, name),
            }
        case ["", *_]:
            return {}
    raise ValueError(
        f"{':'.join(words)!r} of the device {name!r} is not known; "
        "expected parts such as /job:ps/task:0/device:CPU:0"
    )


def _device_number(number: str, name: str) -> dict[str, int]:
    return {} if number == "*" else {"number": _number(number, name)}


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} of the device {name!r} is not a whole number") from None
