"""What the columns of a table hold: all of its lines decide that together."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ftrain.cli.data.errors import DataCommandError

_INT64 = range(-(1 << 63), 1 << 63)


class ColumnKinds:
    """The kind of every feature, "int64", "float" or "bytes": integers become floats where there are floats too."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._beyond: dict[
            str, tuple[str, int]
        ] = {}  # integers that do not fit, but might become floats

    def get(self, name: str) -> str | None:
        return self._kinds.get(name)

    def set(self, name: str, kind: str) -> None:
        self._kinds[name] = kind

    def join(self, name: str, kind: str, where: str) -> None:
        """Takes in the kind that a feature has in one more line; an error if that is numbers here and bytes there."""
        known = self._kinds.setdefault(name, kind)
        if known == kind:
            return
        if "bytes" in (known, kind):
            what = {"bytes": "text"}
            found, wanted = what.get(kind, "numbers"), what.get(known, "numbers")
            raise DataCommandError(
                f"{where}: feature {name} is {found}, and {wanted} in the lines before; make it one"
            )
        self._kinds[name] = "float"

    def note_range(self, name: str, values: Sequence[int], where: str) -> None:
        """Remembers the first integer of a feature that int64 does not hold."""
        for value in (min(values), max(values)):
            if value not in _INT64:
                self._beyond.setdefault(name, (where, value))

    def check(self) -> None:
        """An error if a feature of integers has one that does not fit."""
        for name, (where, value) in self._beyond.items():
            if self._kinds[name] == "int64":
                raise DataCommandError(
                    f"{where}: feature {name} has the value {value}, and integers are int64; "
                    "write it as a float, such as 1e20, or as text"
                )


def as_floats(values: Any, name: str, where: str) -> np.ndarray:
    """The values as float32, in which Examples keep them; an error if one would become infinite."""
    try:
        wide = np.asarray(values, np.float64)
    except OverflowError:
        raise DataCommandError(f"{where}: feature {name} has an integer beyond any float") from None
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    lost = np.isinf(narrow) & np.isfinite(wide)
    if lost.any():
        value = wide[lost].ravel()[0]
        raise DataCommandError(
            f"{where}: feature {name} has the value {value}, beyond float32, which Examples keep"
        )
    return narrow
