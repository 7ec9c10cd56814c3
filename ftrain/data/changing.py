"""Changing: examples as a function makes them, and only those that a function keeps."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ftrain.data.combining import check_plain
from ftrain.data.source import Batch, Source, check_batch, describe, to_rows, where

_CHUNK = 1024  # examples that are looked at together

Example = dict[str, Any]


class MapSource:
    """The examples of a source as `function` makes them, of the same number and in the same order.

    It is given whole batches, a dict of arrays, and must treat each example alone: which of them come together depends
    on who reads. With `each` it is given one example at a time. What is drawn at random, anew in each epoch, belongs
    into the `transform` of a Pipeline.
    """

    def __init__(self, source: Source, function: Callable[[Any], Any], *, each: bool = False):
        self.source, self.function, self.each = source, function, each
        if hasattr(source, "order"):
            self.order = source.order  # pyright: ignore[reportAttributeAccessIssue] - it was looked for

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"MapSource({describe(self.source)}, {name_of(self.function)})"

    def where(self, index: int) -> str:
        return where(self.source, index)

    def read(self, indices: np.ndarray) -> Batch:
        batch, name = self.source.read(indices), name_of(self.function)
        if not self.each:
            made = call(self.function, batch, place=lambda: f"a batch of {describe(self.source)}")
            return check_batch(made, len(indices), name)
        made = [
            call(self.function, example, place=functools.partial(where, self.source, int(index)))
            for example, index in zip(split(batch), indices, strict=True)
        ]
        return join(made, name)


class FilterSource:
    """The examples of a source that `keep` answers with true for, given a batch: an array of truths.

    All of them are looked at once, when the source is first used; the indices of those that are kept stay in memory.
    """

    def __init__(self, source: Source, keep: Callable[[Batch], np.ndarray]):
        check_plain(source, "FilterSource")
        self.source, self.keep = source, keep

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """The indices, in the source, of the examples that are kept."""
        chunks = (
            np.arange(at, min(at + _CHUNK, len(self.source)))
            for at in range(0, len(self.source), _CHUNK)
        )
        return np.concatenate([np.empty(0, np.int64), *map(self._kept_of, chunks)])

    def __len__(self) -> int:
        return len(self.kept)

    def __repr__(self) -> str:
        return f"FilterSource({describe(self.source)}, {name_of(self.keep)})"

    def where(self, index: int) -> str:
        return where(self.source, int(self.kept[index]))

    def read(self, indices: np.ndarray) -> Batch:
        return self.source.read(self.kept[indices])

    def _kept_of(self, indices: np.ndarray) -> np.ndarray:
        place = f"the examples from {indices[0]} to {indices[-1]} of {describe(self.source)}"
        truths = np.asarray(call(self.keep, self.source.read(indices), place=lambda: place))
        if truths.dtype != bool or truths.shape != indices.shape:
            raise ValueError(
                f"{name_of(self.keep)} should answer with {len(indices)} truths, got {truths.dtype}{list(truths.shape)}"
            )
        return indices[truths]


def split(batch: Batch) -> list[Example]:
    """The examples of a batch."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def join(examples: list[Example], maker: str) -> Batch:
    """A batch of examples; features of unequal shapes become arrays of objects."""
    for example in examples:
        if not isinstance(example, Mapping):
            raise TypeError(
                f"{maker} should answer with a dict of values, got {type(example).__name__}"
            )
    names = examples[0].keys() if examples else ()
    for example in itertools.islice(examples, 1, None):
        if example.keys() != names:
            raise ValueError(
                f"{maker} gave an example with {', '.join(example)}; the first had {', '.join(names)}"
            )
    batch = {name: to_rows([example[name] for example in examples]) for name in names}
    for name, column in batch.items():
        if column.dtype.hasobject:
            _check_dtypes(name, column, maker)
    return batch


def _check_dtypes(name: str, column: np.ndarray, maker: str) -> None:
    """Numbers of several dtypes would become what those that they are read with are."""
    arrays = [
        value for value in column if isinstance(value, np.ndarray) and value.size
    ]  # an empty one says nothing
    dtypes = {array.dtype for array in arrays if array.dtype.kind in "biufc"}
    if len(dtypes) > 1:
        raise ValueError(
            f"{maker} gave {name} as {' and as '.join(sorted(map(str, dtypes)))}; make it one of them"
        )


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def call(function: Callable[..., Any], *arguments: Any, place: Callable[[], str]) -> Any:
    """What the function makes; an error tells which one it was, and what it was given."""
    try:
        return function(*arguments)
    except Exception as error:
        error.add_note(f"raised by {name_of(function)}, given {place()}")
        raise
