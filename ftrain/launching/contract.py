"""The contract: what a supervisor and the processes that it starts tell each other, and how."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Variables of the environment that a process is started with.
CLUSTER = "FTRAIN_CLUSTER"  # JSON: the addresses of all processes, and which of them this one is
PROGRESS = "FTRAIN_PROGRESS"  # a file descriptor to write messages to, one a line
LIFELINE = "FTRAIN_LIFELINE"  # a file descriptor to read from: its end of file is the end of the supervisor
HANG_TIMEOUT = "FTRAIN_HANG_TIMEOUT"  # seconds without a sign of life after which a process is taken for hanging
ATTEMPT = "FTRAIN_ATTEMPT"  # how often the group was restarted
INJECT = "FTRAIN_INJECT"  # faults to perform, as `parse_faults` reads them
LAUNCHER = "FTRAIN_LAUNCHER"  # the process id of the supervisor
AFTER_FAILURE = (
    "FTRAIN_PROCESSES_AFTER_FAILURE"  # how many processes a restart would have, if not as many
)
TASK = "FTRAIN_TASK"  # not given, as CLUSTER says it: but a user may have set it
TOKEN = "FTRAIN_JOB_TOKEN"  # a secret that the processes of a job prove to each other to know
VARIABLES = (
    CLUSTER,
    PROGRESS,
    LIFELINE,
    HANG_TIMEOUT,
    ATTEMPT,
    INJECT,
    LAUNCHER,
    AFTER_FAILURE,
    TASK,
    TOKEN,
)
VISIBLE_GPUS = "JAX_CUDA_VISIBLE_DEVICES"  # jax's own

# Exit codes of a process. 0: done, or stopped as asked; any other than these, or a signal: it failed.
USER_ERROR = 2  # a mistake that a restart would repeat
TRANSIENT = (
    74  # an error of the operating system that may pass, retried in vain: a restart may help
)
PEER_FAILED = 75  # it ended because another process did
HUNG = 76  # its own watchdog ended it

HANG = "Hang"  # the kind of failure that a watchdog tells

LINE_LIMIT = (
    4096  # bytes of a message with its newline; a pipe takes that many at once, so lines do not mix
)
_WORD_LIMIT = 200  # characters of a name


@dataclass(frozen=True)
class Progress:
    """A step was taken or, with `busy`, something else keeps the process from taking one: "compiling", "starting"."""

    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    busy: str | None = None


@dataclass(frozen=True)
class Failed:
    """Why the process is about to end: for a reason of its own, or because another process did."""

    kind: str
    message: str = ""
    retry: bool = True  # False: a restart would not help
    because: int | None = None


@dataclass(frozen=True)
class Stopped:
    """The process ends early, with exit code 0, because it was asked to by this signal."""

    signal: str


@dataclass(frozen=True)
class Done:
    """The process has nothing left to do but to end."""

    step: int


Message = Progress | Failed | Stopped | Done


def encode(message: Message) -> bytes:
    """A message as a line. A text that is too long for one is cut.

    >>> encode(Progress(step=120, steps=2000, loss=0.5))
    b'{"step": 120, "steps": 2000, "loss": 0.5}\\n'
    """
    line = (json.dumps(_fields(message)) + "\n").encode()
    while isinstance(message, Failed) and len(line) > LINE_LIMIT:
        # In proportion, because a character may take up to twelve bytes.
        message = replace(
            message,
            message=message.message[: len(message.message) * (LINE_LIMIT - 64) // len(line)],
        )
        line = (json.dumps(_fields(message)) + "\n").encode()
    return line


def decode(line: bytes) -> Message | None:
    """The message of a line, or None if it is none: a process may write anything.

    >>> decode(b'{"failed": "NotFiniteError", "message": "loss is nan", "retry": false}')
    Failed(kind='NotFiniteError', message='loss is nan', retry=False, because=None)
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return _message(fields) if isinstance(fields, dict) else None


def environment(
    index: int,
    addresses: Sequence[str],
    *,
    hang_timeout: float,
    attempt: int,
    inject: str | None,
    gpus: int | None,
) -> dict[str, str]:
    """The variables for process `index`, but for its file descriptors. With `gpus`, it sees so many of its own."""
    cluster = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    variables = {
        CLUSTER: json.dumps(cluster),
        HANG_TIMEOUT: f"{hang_timeout}",
        ATTEMPT: f"{attempt}",
    }
    if inject is not None:
        variables[INJECT] = inject
    if gpus is not None:
        variables[VISIBLE_GPUS] = ",".join(
            str(gpu) for gpu in range(index * gpus, (index + 1) * gpus)
        )
    return variables


def _fields(message: Message) -> dict[str, Any]:
    match message:
        case Progress(step, steps, loss, busy):
            fields = {
                "step": step,
                "steps": steps,
                "loss": loss,
                "busy": busy and busy[:_WORD_LIMIT],
            }
            return {name: value for name, value in fields.items() if value is not None}
        case Failed(kind, text, retry, because):
            reason = {"retry": retry} if because is None else {"because": because}
            return {"failed": kind[:_WORD_LIMIT], "message": text, **reason}
        case Stopped(name):
            return {"stopped": name[:_WORD_LIMIT]}
        case Done(step):
            return {"done": step}


def _message(fields: Mapping[str, Any]) -> Message | None:
    step, because = _count(fields.get("step")), _count(fields.get("because"))
    kind, busy, signal = (_text(fields.get(name)) for name in ("failed", "busy", "stopped"))
    done = _count(fields.get("done"))
    if kind is not None or because is not None:
        return Failed(
            kind or "",
            _text(fields.get("message")) or "",
            fields.get("retry") is not False,
            because,
        )
    if signal is not None:
        return Stopped(signal)
    if done is not None:
        return Done(done)
    if step is not None or busy is not None:
        return Progress(step, _count(fields.get("steps")), _number(fields.get("loss")), busy)
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(value: object) -> float | None:
    if isinstance(value, float):
        return value
    count = _count(value)
    return float(count) if count is not None and math.log10(count + 1) < 300 else None
