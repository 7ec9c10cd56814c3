"""What stands here for a name of the reference: `ftrain migrate AdamOptimizer`. There are no aliases."""

import difflib
import importlib
from typing import Any

from ftrain.migration import clusters, feeding, optimizing, running, saving
from ftrain.migration.counterpart import Counterpart

_MODULES = (
    "tf.",
    "compat.v1.",
    "train.",
    "io.",
    "python_io.",
    "image.",
    "queue_runner.",
    "contrib.",
    "training.",
    "errors.",
    "data.",
)  # in the order in which they stand in front of names
TABLE: dict[str, Counterpart] = (
    optimizing.TABLE | running.TABLE | feeding.TABLE | saving.TABLE | clusters.TABLE
)


def find(name: str) -> tuple[str, Counterpart]:
    """The reference's full name and our counterpart, for a name with or without the modules in front of it.

    Capitals do not matter, and neither does a missing "Optimizer" at the end.
    """
    known = {_shorten(full).lower(): full for full in TABLE}
    short = _shorten(name)
    for written in (short.lower(), f"{short.lower()}optimizer"):
        if written in known:
            return known[written], TABLE[known[written]]
    near = difflib.get_close_matches(short, map(_shorten, TABLE), n=2, cutoff=0.7)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise LookupError(f"{name} is not a name of tf.train that has a counterpart here yet{hint}")


def _shorten(name: str) -> str:
    for module in _MODULES:
        name = name.removeprefix(module)
    return name


def resolve(dotted: str) -> Any:
    """The object that a dotted name stands for."""
    first, *rest = dotted.split(".")
    found = importlib.import_module(first)
    for name in rest:
        found = getattr(found, name)
    return found
