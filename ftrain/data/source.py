"""Sources: examples that can be read by index, a whole batch of indices at once."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class Source(Protocol):
    """Anything with a length and `read`."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices`, stacked along a leading axis."""
        ...


class ArraySource:
    """Arrays in memory (or memory-mapped), one example to an entry of the first axis."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        if not isinstance(arrays, Mapping):
            raise TypeError(f"an ArraySource takes arrays by name, {{'x': array}}, got {type(arrays).__name__}")
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        if not self.arrays:
            raise ValueError("an ArraySource needs at least one array")
        scalars = [name for name, array in self.arrays.items() if array.ndim == 0]
        if scalars:
            raise ValueError(f"array {scalars[0]} is a scalar; it needs a first axis of examples")
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"arrays must have the same number of examples, got {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: _rows(array, indices) for name, array in self.arrays.items()}


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

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {self.name: self.windows[indices]}


def _rows(array: np.ndarray, indices: np.ndarray) -> np.ndarray:
    # Twice as fast as array[indices], but it would copy the whole of an array that is not contiguous.
    return array.take(indices, axis=0) if array.flags.c_contiguous else array[indices]
