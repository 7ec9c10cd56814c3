"""Faults that a job is to survive, as they are typed: "kill rank=1 step=40; slow_data rank=0 step=80 secs=5"."""

import math
import re
from dataclasses import dataclass

# What stands after each kind; a key in brackets may be left out.
_KEYS = {
    "kill": ("rank", "step"),
    "freeze": ("rank", "step"),
    "hang": ("rank", "step"),
    "slow_data": ("rank", "step", "secs"),
    "nan": ("rank", "step"),
    "full_disk": ("[rank]", "step"),
    "exit": ("rank", "step", "code"),
}
_WHOLE = re.compile(r"[0-9]{1,18}")
_HIGHEST_EXIT_CODE = 255


@dataclass(frozen=True)
class Fault:
    """Something that is to go wrong in process `rank` (None: wherever it applies) at a step."""

    kind: str
    rank: int | None
    step: int
    secs: float | None = None
    code: int | None = None


def parse_faults(text: str) -> list[Fault]:
    """The faults of a text, which are separated by semicolons.

    >>> parse_faults("kill rank=1 step=40; full_disk step=100")
    [Fault(kind='kill', rank=1, step=40, secs=None, code=None), Fault(kind='full_disk', rank=None, step=100, secs=None, code=None)]
    """  # noqa: E501 - a doctest's output cannot be broken
    return [_parse(piece.strip()) for piece in text.split(";") if piece.strip()]


def _parse(piece: str) -> Fault:
    kind, *words = piece.split()
    if kind not in _KEYS:
        raise ValueError(f"fault {piece!r}: unknown kind {kind!r}; there are {', '.join(_KEYS)}")
    values: dict[str, str | None] = {"rank": None, "step": None, "secs": None, "code": None}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in {name.strip("[]") for name in _KEYS[kind]}:
            raise ValueError(f"fault {piece!r}: {word!r} cannot stand there; wanted {_form(kind)}")
        if values[key] is not None:
            raise ValueError(f"fault {piece!r}: {key} stands there twice; wanted {_form(kind)}")
        values[key] = value
    missing = [key for key in _KEYS[kind] if not key.startswith("[") and values[key] is None]
    if missing:
        raise ValueError(f"fault {piece!r}: {' and '.join(missing)} missing; wanted {_form(kind)}")
    return Fault(
        kind,
        None if values["rank"] is None else _whole(piece, "rank", values["rank"]),
        _whole(piece, "step", values["step"] or ""),
        None if values["secs"] is None else _seconds(piece, values["secs"]),
        None
        if values["code"] is None
        else _whole(piece, "code", values["code"], _HIGHEST_EXIT_CODE),
    )


def _form(kind: str) -> str:
    """How a fault of a kind is written.

    >>> _form("full_disk")
    "'full_disk [rank=..] step=..'"
    """
    return repr(
        " ".join(
            [
                kind,
                *(
                    f"[{key[1:-1]}=..]" if key.startswith("[") else f"{key}=.."
                    for key in _KEYS[kind]
                ),
            ]
        )
    )


def _whole(piece: str, key: str, value: str, highest: int | None = None) -> int:
    wanted = "a whole number" if highest is None else f"a whole number up to {highest}"
    if not _WHOLE.fullmatch(value) or (highest is not None and int(value) > highest):
        raise ValueError(f"fault {piece!r}: {key} is {wanted}, got {value!r}")
    return int(value)


def _seconds(piece: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"fault {piece!r}: secs is a number above 0, got {value!r}")
    return seconds
