"""Matching: which leaf of a checkpoint is to become which leaf of a tree."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ftrain.checkpoints.casting import kind_of
from ftrain.checkpoints.errors import CheckpointError, MismatchError

UNKNOWN = "?"  # whether a leaf of plain Orbax is a key
WAY_OUT = (
    "strict=False takes what fits, include, exclude and rename a part of it, cast=True other dtypes"
)


@dataclasses.dataclass(frozen=True)
class Selection:
    """What of a checkpoint is taken.

    Of the leaves of a tree, those whose whole name matches a pattern of `include` (all, if there is none) and none of
    `exclude`; the others keep their values. `rename` maps patterns of names in the checkpoint to the names in the tree.
    With `cast`, numbers may change their dtype. Without `strict`, whatever does not fit keeps its value too.
    """

    strict: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cast: bool = False

    def __post_init__(self):
        for pattern in (*self.include, *self.exclude, *self.rename):
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(f"{pattern!r} is not a regular expression: {error}") from None

    def takes(self, name: str) -> bool:
        is_included = not self.include or _matches(name, self.include)
        return is_included and not _matches(name, self.exclude)

    def renamed(self, name: str) -> str:
        """A name as the first pattern that is in it says."""
        for pattern, replacement in self.rename.items():
            if re.search(pattern, name):
                try:
                    return re.sub(pattern, replacement, name)
                except (re.error, IndexError) as error:
                    raise CheckpointError(
                        f"rename has {replacement!r} for {pattern!r}: {error}"
                    ) from None
        return name


def match(
    path: Path | str,
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    selection: Selection,
    *,
    hint: bool = True,
) -> dict[str, str]:
    """The name in the checkpoint of every leaf that is taken; all that does not fit is told in one error."""
    saved = _renamed(path, found, selection)
    _check_patterns(path, found, {*saved, *wanted}, selection)
    taken = {name: saved[name] for name in wanted if selection.takes(name) and name in saved}
    other = [name for name in taken if not _fits(found[taken[name]], wanted[name], selection.cast)]
    missing = [name for name in wanted if selection.takes(name) and name not in saved]
    unexpected = [name for name in saved if selection.takes(name) and name not in wanted]
    if selection.strict and (missing or unexpected or other):
        phrases = [f"leaf {name} is missing" for name in missing]
        phrases += [f"leaf {name} is not expected" for name in unexpected]
        phrases += [
            f"leaf {name} is {_describe_kind(found[taken[name]])}, expected {_describe_kind(wanted[name])}"
            for name in other
        ]
        raise MismatchError(path, phrases, WAY_OUT if hint else "")
    fitting = {name: source for name, source in taken.items() if name not in other}
    if not fitting:
        raise MismatchError(
            path, [f"of its {len(found)} leaves none is taken; it has {_some(found)}"]
        )
    return fitting


def describe(leaf: Any) -> str:
    """The dtype and shape of a leaf."""
    try:
        dtype = np.dtype(leaf.dtype).name
    except TypeError:  # text, and other things of TensorFlow's
        dtype = str(leaf.dtype)
    return f"{dtype}{list(leaf.shape)}"


def _describe_kind(leaf: Any) -> str:
    key = getattr(leaf, "key", None)
    return describe(leaf) + (f" (a key of {key})" if key else "")


def as_patterns(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """One pattern or several."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _check_patterns(
    path: Path | str, found: Iterable[str], names: Iterable[str], selection: Selection
) -> None:
    """A pattern that is about no leaf is a slip."""
    for pattern in (*selection.include, *selection.exclude):
        if not any(re.fullmatch(pattern, name) for name in names):
            raise CheckpointError(
                f"{path}: no leaf has a name that is, as a whole, {pattern!r}; there are {_some(names)}"
            )
    for pattern in selection.rename:
        if not any(re.search(pattern, name) for name in found):
            raise CheckpointError(
                f"{path}: no leaf has a name with {pattern!r} in it; there are {_some(found)}"
            )


def _renamed(path: Path | str, found: Iterable[str], selection: Selection) -> dict[str, str]:
    saved: dict[str, str] = {}
    for name in found:
        new = selection.renamed(name)
        if new in saved:
            raise CheckpointError(
                f"{path}: leaves {saved[new]} and {name} would both be {new}; mend the renames"
            )
        saved[new] = name
    return saved


def _fits(found: Any, wanted: Any, may_cast: bool) -> bool:
    is_castable = (
        may_cast
        and kind_of(found.dtype) is not None
        and kind_of(found.dtype) == kind_of(wanted.dtype)
    )
    is_same_key = getattr(found, "key", UNKNOWN) in (UNKNOWN, getattr(wanted, "key", None))
    is_same_dtype = np.dtype(found.dtype) == np.dtype(wanted.dtype)
    return (
        tuple(found.shape) == tuple(wanted.shape) and is_same_key and (is_castable or is_same_dtype)
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
