"""Sources: examples that can be read by index, a whole batch of indices at once."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ftrain.formats.examples.columns import as_objects

Batch = dict[str, np.ndarray]


class Source(Protocol):
    """Anything with a length and `read`.

    Two more methods are used where they are there: `where(index) -> str` names an example in messages, and
    `order(positions, seed, shuffle) -> indices` chooses the example at each position of the endless stream, which
    otherwise are epochs, one behind the other.
    """

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices`, stacked along a leading axis, in arrays that are the caller's to change."""
        ...


class RangeSource:
    """The numbers below `length`, as "index": for data that are computed, by a MapSource, and not read."""

    def __init__(self, length: int):
        if length < 0:
            raise ValueError(f"length must be >= 0, got {length}")
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"RangeSource({self._length})"

    def read(self, indices: np.ndarray) -> Batch:
        return {"index": np.array(indices, np.int64)}


class WindowSource:
    """One long sequence, read as windows of `length` that start every `stride` elements."""

    def __init__(self, sequence: np.ndarray, length: int, *, stride: int = 1, name: str = "tokens"):
        if length < 1 or stride < 1:
            raise ValueError(f"length and stride must be >= 1, got {length} and {stride}")
        if len(sequence) < length:
            raise ValueError(f"a window of {length} is longer than the sequence of {len(sequence)}")
        self.windows = np.lib.stride_tricks.sliding_window_view(sequence, length)[::stride]
        self.name = name

    def __len__(self) -> int:
        return len(self.windows)

    def __repr__(self) -> str:
        return f"WindowSource({self.name}, {len(self)} windows)"

    def read(self, indices: np.ndarray) -> Batch:
        return {self.name: self.windows[indices]}


def where(source: Source, index: int) -> str:
    """An example's name in messages."""
    own = getattr(source, "where", None)
    return own(index) if own else f"{describe(source)}: example {index}"


def describe(source: Any) -> str:
    """A source's name in messages: what it says of itself, or its class."""
    return repr(source) if type(source).__repr__ is not object.__repr__ else type(source).__name__


def check_batch(batch: Any, count: int, maker: str) -> Batch:
    """The batch, if it has names and `count` examples; else an error that names who made it."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"{maker} should answer with a dict of arrays, got {type(batch).__name__}")
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != count:
            raise ValueError(
                f"{maker} gave {name} with the shape {array.shape}, wanted {count} along the first axis"
            )
    return arrays


def to_rows(values: list[Any]) -> np.ndarray:
    """Values of examples as one array; texts, and what has unequal shapes, as an array of objects."""
    if isinstance(values[0], (bytes, str)):
        return as_objects(values)
    return settle(as_objects([np.asarray(value) for value in values]))


def settle(column: np.ndarray) -> np.ndarray:
    """Objects that are arrays of one shape as one array, so that it does not matter who was read with whom."""
    if column.dtype != object or not all(isinstance(value, np.ndarray) for value in column):
        return column
    if len({value.shape for value in column}) > 1 or len({value.dtype for value in column}) > 1:
        return column
    return np.stack(list(column))


def size_of(batch: Batch) -> int:
    """The bytes of a batch; of arrays of objects, as the first few of them let one guess."""
    return sum(
        _object_bytes(array) if array.dtype.hasobject else array.nbytes for array in batch.values()
    )


def _object_bytes(column: np.ndarray) -> int:
    few = column.ravel()[:8]
    each = [
        getattr(value, "nbytes", None) or (len(value) if hasattr(value, "__len__") else 8)
        for value in few
    ]
    return sum(each) * column.size // max(len(each), 1)
