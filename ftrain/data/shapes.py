"""Shapes: a compiled step is made for batches of one form, so a batch of another form is told, and where it came."""

import warnings
from typing import Any

import jax
import numpy as np


class ShapeWatch:
    """Numbers the forms of batches, in the order in which they first come.

    Other dtypes or other names are an error: they are a mistake in the data. Other shapes, such as that of a smaller
    last batch, cost a compilation each, and a warning says so, unless they are `expected`.
    """

    def __init__(self) -> None:
        self._forms: list[dict[str, tuple[str, tuple[int, ...]]]] = []
        self._numbers: dict[Any, int] = {}  # by what tells forms apart quickly

    def kind(self, batch: Any, step: int, *, expected: bool = False) -> int:
        """The number of a batch's form; `step` counts the steps before it."""
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
                f"the batch of step {step} has {', '.join(form) or 'nothing'}; the first one had {', '.join(first)}"
            )
        changed = [name for name in form if form[name] != first[name]]
        phrases = ", ".join(
            f"{name} is {_show(form[name])}, it was {_show(first[name])}" for name in changed
        )
        if any(form[name][0] != first[name][0] for name in changed):
            raise ValueError(
                f"the batch of step {step} has other dtypes than the first one: {phrases}"
            )
        if not expected and len(self._forms) == 1:  # told once
            warnings.warn(
                f"the batch of step {step} has another shape than the first one: {phrases}; every new shape is "
                "compiled anew: pad to one length, Pad(64), or to few, Pad(multiple=64) or Buckets; or leave the last "
                "batch out",
                stacklevel=2,
            )


def check_numbers(batch: Any) -> Any:
    """The batch, unless it has something that no device takes."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        if (
            isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufcV"
        ):  # V: bfloat16 and its like
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(f"{name} holds {_contents(leaf, name)}")
    return batch


def check_integers(batch: Any) -> None:
    """Raise ValueError for a 64-bit integer that JAX, without 64 bits, would cut to another number without a word."""
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
                f"{name} has the value {value}, which {narrow.dtype} cannot hold, and JAX would cut it to that: "
                "hash or renumber such ids in the pipeline, or set JAX_ENABLE_X64=1"
            )


def _contents(array: np.ndarray, name: str) -> str:
    first = array.flat[0] if array.size else None
    if isinstance(first, np.ndarray | list):
        return f"arrays of unequal shapes, which no device takes: Pipeline(..., pad={{{name!r}: Pad()}}) pads them"
    kind = type(first).__name__ if array.dtype.hasobject else array.dtype
    return f"{kind}, which no device takes: leave it out of the spec, or decode it, MapSource(source, function)"


def _quick_form(batch: Any) -> Any:
    """Of a dict of arrays, as a pipeline gives, names, dtypes and shapes; None for other trees."""
    if type(batch) is not dict or not all([type(leaf) is np.ndarray for leaf in batch.values()]):  # noqa: C419 - quicker
        return None
    return tuple([(name, leaf.dtype, leaf.shape) for name, leaf in batch.items()])


def _form(leaf: Any) -> tuple[str, tuple[int, ...]]:
    return str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype), tuple(
        np.shape(leaf)
    )


def _show(form: tuple[str, tuple[int, ...]]) -> str:
    return f"{form[0]}{list(form[1])}"
