"""The protocol between the supervisor and its processes: variables, exit codes, messages."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Environment variables of a child process.
CLUSTER = "FTRAIN_CLUSTER"  # JSON: the addresses of all processes, and the task of this one
PROGRESS = "FTRAIN_PROGRESS"  # a file descriptor to write messages to, one per line
LIFELINE = "FTRAIN_LIFELINE"  # a file descriptor that reaches end of file when the supervisor dies
HANG_TIMEOUT = "FTRAIN_HANG_TIMEOUT"  # seconds without a sign of life that count as a hang
ATTEMPT = "FTRAIN_ATTEMPT"  # the number of restarts so far
INJECT = "FTRAIN_INJECT"  # faults to inject, in the syntax of `parse_faults`
LAUNCHER = "FTRAIN_LAUNCHER"  # the process id of the supervisor
AFTER_FAILURE = (
    "FTRAIN_PROCESSES_AFTER_FAILURE"  # the number of processes of a restart, if it differs
)
TASK = "FTRAIN_TASK"  # never set here, because CLUSTER contains it; but a user may have set it
TOKEN = "FTRAIN_JOB_TOKEN"  # the secret that authenticates the processes of a job to each other
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

# Exit codes of a child process. 0: done, or stopped as requested. Other codes and signals: failed.
USER_ERROR = 2  # a mistake that a restart would repeat
TRANSIENT = 74  # a transient error of the operating system, after retries; a restart may help
PEER_FAILED = 75  # it ended because another process failed
HUNG = 76  # its own watchdog ended it

HANG = "Hang"  # the kind of failure that a watchdog reports

MAX_LINE = 4096  # bytes of a message with its newline: a pipe writes these atomically
_MAX_WORD = 200  # characters of a name


@dataclass(frozen=True)
class Progress:
    """A step has finished; with `busy`, other work such as "compiling" delays the next one."""

    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    busy: str | None = None


@dataclass(frozen=True)
class Failed:
    """Why the process is about to end: an error of its own, or the failure of process `because`."""

    kind: str
    message: str = ""
    retry: bool = True  # False: a restart would not help
    because: int | None = None


@dataclass(frozen=True)
class Stopped:
    """The process ends early, with exit code 0, because this signal requested it."""

    signal: str


@dataclass(frozen=True)
class Done:
    """The process has finished its last step and is about to exit."""

    step: int


Message = Progress | Failed | Stopped | Done


def encode(message: Message) -> bytes:
    """Return a message as a line; a text that is too long is truncated.

    >>> encode(Progress(step=120, steps=2000, loss=0.5))
    b'{"step": 120, "steps": 2000, "loss": 0.5}\\n'
    """
    line = (json.dumps(_fields(message)) + "\n").encode()
    while isinstance(message, Failed) and len(line) > MAX_LINE:
        # In proportion, because JSON may need up to twelve bytes for a character.
        message = replace(
            message,
            message=message.message[: len(message.message) * (MAX_LINE - 64) // len(line)],
        )
        line = (json.dumps(_fields(message)) + "\n").encode()
    return line


def decode(line: bytes) -> Message | None:
    """Return the message of a line, or None if it is not a message.

    >>> decode(b'{"failed": "NonFiniteError", "message": "loss is nan", "retry": false}')
    Failed(kind='NonFiniteError', message='loss is nan', retry=False, because=None)
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return _message(fields) if isinstance(fields, dict) else None


def _fields(message: Message) -> dict[str, Any]:
    match message:
        case Progress(step, steps, loss, busy):
            fields = {
                "step": step,
                "steps": steps,
                "loss": loss,
                "busy": busy and busy[:_MAX_WORD],
            }
            return {name: value for name, value in fields.items() if value is not None}
        case Failed(kind, text, retry, because):
            reason = {"retry": retry} if because is None else {"because": because}
            return {"failed": kind[:_MAX_WORD], "message": text, **reason}
        case Stopped(name):
            return {"stopped": name[:_MAX_WORD]}
        case Done(step):
            return {"done": step}


def _message(fields: Mapping[str, Any]) -> Message | None:
    step = _count(fields.get("step"))
    because = _count(fields.get("because"))
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
