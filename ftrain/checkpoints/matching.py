"""Matching: which leaf of a checkpoint becomes which leaf of a tree, and with which dtype."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from ftrain.checkpoints.errors import CheckpointError, LeafMismatchError

_UNKNOWN = "?"  # plain Orbax does not record whether a leaf is a random key
_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)
_WAY_OUT = (
    "pass strict=False to restore only the leaves that fit, "
    "include, exclude or rename to choose leaves, cast=True to convert dtypes"
)


class ShapedLeaf(Protocol):
    """A leaf with a shape and a dtype, in a tree or on disk.

    One that holds a random key also has an attribute `key`, the implementation of it.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> Any:
        """Its dtype, or the name of it."""
        ...


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which leaves of a checkpoint are restored.

    A leaf of the tree is restored if its whole name matches a pattern of `include` (or there is
    none) and no pattern of `exclude`; the others keep their values. `rename` maps patterns of names
    in the checkpoint to names in the tree. With `cast`, numbers may change their dtype. Without
    `strict`, leaves that do not fit keep their values too.
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
        """Return True if a leaf of the tree is restored."""
        is_included = not self.include or matches_any(name, self.include)
        return is_included and not matches_any(name, self.exclude)

    def renamed(self, name: str) -> str:
        """Return a name of the checkpoint as changed by the first pattern that it contains."""
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
    found: Mapping[str, ShapedLeaf],
    expected: Mapping[str, ShapedLeaf],
    selection: Selection,
    *,
    hint: bool = True,
) -> dict[str, str]:
    """Map each leaf to restore to its checkpoint name; one error lists all that do not fit."""
    saved = rename_all(path, found, selection)
    _check_patterns(path, found, {*saved, *expected}, selection)
    taken = {name: saved[name] for name in expected if selection.takes(name) and name in saved}
    misfits = [
        name for name in taken if not _fits(found[taken[name]], expected[name], selection.cast)
    ]
    missing = [name for name in expected if selection.takes(name) and name not in saved]
    unexpected = [name for name in saved if selection.takes(name) and name not in expected]
    if selection.strict and (missing or unexpected or misfits):
        phrases = [f"leaf {name} is missing" for name in missing]
        phrases += [f"leaf {name} is not expected" for name in unexpected]
        phrases += [
            f"leaf {name} is {_describe_kind(found[taken[name]])}, "
            f"expected {_describe_kind(expected[name])}"
            for name in misfits
        ]
        raise LeafMismatchError(path, phrases, _WAY_OUT if hint else "")
    fitting = {name: source for name, source in taken.items() if name not in misfits}
    if not fitting:
        raise LeafMismatchError(
            path, [f"none of its {len(found)} leaves is selected; it has {list_some(found)}"]
        )
    return fitting


def describe_leaf(leaf: ShapedLeaf) -> str:
    """Return the dtype and shape of a leaf as text."""
    try:
        dtype = np.dtype(leaf.dtype).name
    except TypeError:  # text, and other types of TensorFlow
        dtype = str(leaf.dtype)
    return f"{dtype}{list(leaf.shape)}"


def _describe_kind(leaf: ShapedLeaf) -> str:
    key = getattr(leaf, "key", None)
    return describe_leaf(leaf) + (f" (a key of {key})" if key else "")


def as_patterns(patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def kind_of(dtype: Any) -> type | None:
    """Return the kind of a dtype: boolean, integer, real or complex; None if not of numbers."""
    try:
        return next((kind for kind in _KINDS if jnp.issubdtype(np.dtype(dtype), kind)), None)
    except TypeError:  # not a numpy dtype
        return None


def cast(value: np.ndarray, dtype: Any, name: str, *, copy: bool = False) -> np.ndarray:
    """Return the value of a leaf in another dtype; an error if a number does not fit into it."""
    with np.errstate(over="ignore", invalid="ignore"):
        new = value.astype(dtype, copy=copy)
    if new.dtype == value.dtype:
        return new
    is_lost = (
        new != value if kind_of(dtype) is np.integer else np.isfinite(new) != np.isfinite(value)
    )
    if np.any(is_lost):
        raise CheckpointError(
            f"leaf {name} is {value.dtype} in the checkpoint, with values too large for {dtype}"
        )
    return new


def _check_patterns(
    path: Path | str, found: Iterable[str], names: Iterable[str], selection: Selection
) -> None:
    """Raise an error for a pattern that matches no leaf: it is misspelled."""
    for pattern in (*selection.include, *selection.exclude):
        if not any(re.fullmatch(pattern, name) for name in names):
            raise CheckpointError(
                f"{path}: pattern {pattern!r} matches no leaf; there are {list_some(names)}"
            )
    for pattern in selection.rename:
        if not any(re.search(pattern, name) for name in found):
            raise CheckpointError(
                f"{path}: rename pattern {pattern!r} matches no leaf; there are {list_some(found)}"
            )


def rename_all(path: Path | str, found: Iterable[str], selection: Selection) -> dict[str, str]:
    """Return the names of a checkpoint by what they are renamed to."""
    saved: dict[str, str] = {}
    for name in found:
        new = selection.renamed(name)
        if new in saved:
            raise CheckpointError(
                f"{path}: leaves {saved[new]} and {name} would both be {new}; change rename"
            )
        saved[new] = name
    return saved


def _fits(found: ShapedLeaf, expected: ShapedLeaf, may_cast: bool) -> bool:
    is_castable = (
        may_cast
        and kind_of(found.dtype) is not None
        and kind_of(found.dtype) == kind_of(expected.dtype)
    )
    is_same_key = getattr(found, "key", _UNKNOWN) in (_UNKNOWN, getattr(expected, "key", None))
    is_same_dtype = np.dtype(found.dtype) == np.dtype(expected.dtype)
    return (
        tuple(found.shape) == tuple(expected.shape)
        and is_same_key
        and (is_castable or is_same_dtype)
    )


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a whole name matches one of the patterns."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def list_some(names: Iterable[str]) -> str:
    """Return up to three names, for an error message."""
    names = sorted(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
