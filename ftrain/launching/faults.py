"""Fault injection: the syntax of "kill rank=1 step=40; slow_data rank=0 step=80 secs=5"."""

import math
import re
from dataclasses import dataclass

# The keys of each kind of fault; a key in brackets is optional.
_KEYS = {
    "kill": ("rank", "step"),
    "freeze": ("rank", "step"),
    "hang": ("rank", "step"),
    "slow_data": ("rank", "step", "secs"),
    "nan": ("rank", "step"),
    "full_disk": ("[rank]", "step"),
    "exit": ("rank", "step", "code"),
}
_INTEGER = re.compile(r"[0-9]{1,18}")
_MAX_EXIT_CODE = 255


@dataclass(frozen=True)
class Fault:
    """A fault to inject into process `rank` at a step; rank None: each process that it concerns."""

    kind: str
    rank: int | None
    step: int
    secs: float | None = None
    code: int | None = None


def parse_faults(text: str) -> list[Fault]:
    """Parse faults that are separated by semicolons.

    >>> faults = parse_faults("kill rank=1 step=40; full_disk step=100")
    >>> [(fault.kind, fault.rank, fault.step) for fault in faults]
    [('kill', 1, 40), ('full_disk', None, 100)]
    """
    return [_parse(piece.strip()) for piece in text.split(";") if piece.strip()]


def _parse(piece: str) -> Fault:
    kind, *words = piece.split()
    if kind not in _KEYS:
        raise ValueError(
            f"fault {piece!r}: unknown kind {kind!r}; expected one of {', '.join(_KEYS)}"
        )
    values: dict[str, str | None] = {"rank": None, "step": None, "secs": None, "code": None}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in {name.strip("[]") for name in _KEYS[kind]}:
            raise ValueError(f"fault {piece!r}: unexpected {word!r}; expected {_form(kind)}")
        if values[key] is not None:
            raise ValueError(f"fault {piece!r}: {key} is given twice; expected {_form(kind)}")
        values[key] = value
    missing = [key for key in _KEYS[kind] if not key.startswith("[") and values[key] is None]
    if missing:
        raise ValueError(
            f"fault {piece!r}: {' and '.join(missing)} missing; expected {_form(kind)}"
        )
    return Fault(
        kind,
        None if values["rank"] is None else _integer(piece, "rank", values["rank"]),
        _integer(piece, "step", values["step"] or ""),
        None if values["secs"] is None else _seconds(piece, values["secs"]),
        None if values["code"] is None else _integer(piece, "code", values["code"], _MAX_EXIT_CODE),
    )


def _form(kind: str) -> str:
    """Return how a fault of a kind is written.

    >>> _form("full_disk")
    "'full_disk [rank=..] step=..'"
    """
    keys = [f"[{key[1:-1]}=..]" if key.startswith("[") else f"{key}=.." for key in _KEYS[kind]]
    return repr(" ".join([kind, *keys]))


def _integer(piece: str, key: str, value: str, limit: int | None = None) -> int:
    expected = "an integer" if limit is None else f"an integer up to {limit}"
    if not _INTEGER.fullmatch(value) or (limit is not None and int(value) > limit):
        raise ValueError(f"fault {piece!r}: {key} must be {expected}, got {value!r}")
    return int(value)


def _seconds(piece: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"fault {piece!r}: secs must be a finite number > 0, got {value!r}")
    return seconds
