"""Shapes: detect batches whose names, dtypes or shapes change, and values no device supports."""

import warnings
from typing import Any

import jax
import numpy as np


class ShapeWatch:
    """Numbers the forms (names, dtypes and shapes) of batches in the order of first appearance.

    New names or dtypes are a mistake in the data, so an error. A new shape, such as that of a
    smaller last batch, costs a compilation, so a warning, unless it is `expected`.
    """

    def __init__(self) -> None:
        self._forms: list[dict[str, tuple[str, tuple[int, ...]]]] = []
        self._numbers: dict[Any, int] = {}  # by `_quick_form`

    def kind(self, batch: Any, step: int, *, expected: bool = False) -> int:
        """Return the number of the batch's form; `step` counts the steps before it."""
        quick = _quick_form(batch)
        number = self._numbers.get(quick)
        if number is None:
            number = self._number(batch, step, expected)
            if quick is not None:
                self._numbers[quick] = number
        return number

    def _number(self, batch: Any, step: int, expected: bool) -> int:
        form = {
            jax.tree_util.keystr(path, simple=True, separator="/"): _form(leaf)
            for path, leaf in jax.tree.leaves_with_path(batch)
        }
        if form in self._forms:
            return self._forms.index(form)
        if self._forms:
            self._compare(form, step + 1, expected)
        self._forms.append(form)
        return len(self._forms) - 1

    def _compare(
        self, form: dict[str, tuple[str, tuple[int, ...]]], step: int, expected: bool
    ) -> None:
        first = self._forms[0]
        if form.keys() != first.keys():
            raise ValueError(
                f"the batch of step {step} has {', '.join(form) or 'nothing'}, "
                f"expected {', '.join(first)} as in the first one"
            )
        changed = [name for name in form if form[name] != first[name]]
        phrases = ", ".join(
            f"{name} is {_show(form[name])}, it was {_show(first[name])}" for name in changed
        )
        if any(form[name][0] != first[name][0] for name in changed):
            raise ValueError(
                f"the batch of step {step} differs from the first one in dtype: {phrases}"
            )
        if not expected and len(self._forms) == 1:  # warn once
            warnings.warn(
                f"the batch of step {step} differs from the first one in shape: {phrases}; "
                "every new shape is compiled again: pad to one length, Pad(64), or to few, "
                "Pad(multiple=64) or Buckets; or drop the last batch",
                stacklevel=2,
            )


def check_numbers(batch: Any) -> Any:
    """Return the batch; raise TypeError if a leaf has a dtype that no device supports."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        # Kind V is that of bfloat16 and the like.
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufcV":
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(f"{name} holds {_contents(leaf, name)}")
    return batch


def check_integers(batch: Any) -> None:
    """Raise ValueError for a 64-bit integer that JAX without x64 would silently truncate."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        if (
            not isinstance(leaf, np.ndarray)
            or leaf.dtype.kind not in "iu"
            or leaf.dtype.itemsize < 8
            or not leaf.size
        ):
            continue
        narrow = np.iinfo(np.int32 if leaf.dtype.kind == "i" else np.uint32)
        smallest = leaf.min()
        largest = leaf.max()
        if smallest < narrow.min or largest > narrow.max:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            value = largest if largest > narrow.max else smallest
            raise ValueError(
                f"{name} has the value {value}, which {narrow.dtype} cannot hold, so JAX would "
                "truncate it: hash or renumber large ids in the pipeline, or set JAX_ENABLE_X64=1"
            )


def _contents(array: np.ndarray, name: str) -> str:
    first = array.flat[0] if array.size else None
    if isinstance(first, np.ndarray | list):
        return (
            "arrays of unequal shapes, which no device supports: "
            f"Pipeline(..., pad={{{name!r}: Pad()}}) pads them"
        )
    kind = type(first).__name__ if array.dtype.hasobject else array.dtype
    return (
        f"{kind}, which no device supports: remove it from the spec, "
        "or decode it with MapSource(source, function)"
    )


def _quick_form(batch: Any) -> Any:
    """Return names, dtypes and shapes of a dict of arrays; None for any other tree."""
    if type(batch) is not dict:
        return None
    if not all([type(leaf) is np.ndarray for leaf in batch.values()]):  # noqa: C419 - faster
        return None
    return tuple([(name, leaf.dtype, leaf.shape) for name, leaf in batch.items()])


def _form(leaf: Any) -> tuple[str, tuple[int, ...]]:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return str(dtype), tuple(np.shape(leaf))


def _show(form: tuple[str, tuple[int, ...]]) -> str:
    return f"{form[0]}{list(form[1])}"
