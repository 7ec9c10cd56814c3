"""Counterparts of the names of TensorFlow 1, for `ftrain migrate AdamOptimizer`; no aliases."""

import importlib
from typing import Any

from ftrain.migration import input_names, optimizer_names, session_names
from ftrain.migration.counterpart import Counterpart
from ftrain.suggestions import suggest

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
)  # prefixes of names, in the order in which they occur
TABLE: dict[str, Counterpart] = optimizer_names.TABLE | session_names.TABLE | input_names.TABLE


def find(name: str) -> tuple[str, Counterpart]:
    """Return the full name in TF1 and its counterpart, for a name with or without its modules.

    Case is ignored, and so is a missing "Optimizer" at the end.
    """
    known = {_shorten(full).lower(): full for full in TABLE}
    short = _shorten(name)
    for written in (short.lower(), f"{short.lower()}optimizer"):
        if written in known:
            return known[written], TABLE[known[written]]
    hint = suggest(short, map(_shorten, TABLE), count=2, cutoff=0.7)
    raise LookupError(f"{name} is not a name of tf.train that has a counterpart yet{hint}")


def _shorten(name: str) -> str:
    for module in _MODULES:
        name = name.removeprefix(module)
    return name


def resolve(dotted: str) -> Any:
    """Return the object of a dotted name."""
    first, *rest = dotted.split(".")
    found = importlib.import_module(first)
    for name in rest:
        found = getattr(found, name)
    return found
