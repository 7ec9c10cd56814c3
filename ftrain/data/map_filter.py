"""Map and filter: examples changed by a function, and examples selected by a function."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ftrain.data.order import check_has_no_order
from ftrain.data.source import (
    Batch,
    Source,
    check_batch,
    describe,
    join_examples,
    split_examples,
    where,
)

_CHUNK = 1024  # examples that are filtered together


class MapSource:
    """The examples of a source changed by `function`, in the same number and order.

    The function gets whole batches, as a dict of arrays. It must treat each example alone, because
    which examples come together depends on the reader. With `each` it gets one example at a time.
    Random augmentation that differs between epochs belongs into the `transform` of a Pipeline.
    """

    def __init__(self, source: Source, function: Callable[[Any], Any], *, each: bool = False):
        self.source = source
        self.function = function
        self.each = each
        order = getattr(source, "order", None)
        if order is not None:
            self.order = order

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"MapSource({describe(self.source)}, {name_of(self.function)})"

    def where(self, index: int) -> str:
        """Return the name of an example for messages."""
        return where(self.source, index)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the changed examples at `indices`."""
        batch = self.source.read(indices)
        name = name_of(self.function)
        if not self.each:
            made = call(self.function, batch, place=lambda: f"a batch of {describe(self.source)}")
            return check_batch(made, len(indices), name)
        made = [
            call(self.function, example, place=functools.partial(where, self.source, int(index)))
            for example, index in zip(split_examples(batch), indices, strict=True)
        ]
        return join_examples(made, name)


class FilterSource:
    """The examples of a source for which `keep`, given a batch, returns True in a boolean array.

    All examples are read once, at first use. The indices of the kept ones stay in memory.
    """

    def __init__(self, source: Source, keep: Callable[[Batch], np.ndarray]):
        check_has_no_order(source, "FilterSource")
        self.source = source
        self.keep = keep

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """The indices of the kept examples in the source."""
        chunks = (
            np.arange(at, min(at + _CHUNK, len(self.source)))
            for at in range(0, len(self.source), _CHUNK)
        )
        return np.concatenate([np.empty(0, np.int64), *map(self._filter, chunks)])

    def __len__(self) -> int:
        return len(self.kept)

    def __repr__(self) -> str:
        return f"FilterSource({describe(self.source)}, {name_of(self.keep)})"

    def where(self, index: int) -> str:
        """Return the name of an example for messages."""
        return where(self.source, int(self.kept[index]))

    def read(self, indices: np.ndarray) -> Batch:
        """Return the kept examples at `indices`."""
        return self.source.read(self.kept[indices])

    def _filter(self, indices: np.ndarray) -> np.ndarray:
        place = f"the examples from {indices[0]} to {indices[-1]} of {describe(self.source)}"
        mask = np.asarray(call(self.keep, self.source.read(indices), place=lambda: place))
        if mask.dtype != bool or mask.shape != indices.shape:
            raise ValueError(
                f"{name_of(self.keep)} must return {len(indices)} booleans, "
                f"got {mask.dtype}{list(mask.shape)}"
            )
        return indices[mask]


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def call(function: Callable[..., Any], *arguments: Any, place: Callable[[], str]) -> Any:
    """Call a user's function; an error gets a note with the function and `place`, its input."""
    try:
        return function(*arguments)
    except Exception as error:
        error.add_note(f"raised by {name_of(function)}, given {place()}")
        raise
