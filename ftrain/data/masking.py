"""Masks: batches filled up to their full size, with a mask that is 0 for the padding."""

from collections.abc import Collection

import numpy as np

from ftrain.data.batching import Batching, Consecutive
from ftrain.data.source import Batch

MASK = "mask"  # the entry of a batch that is 1 for an example and 0 for padding


class Padded:
    """The batches of a batching, in which those that are not full repeat their last example."""

    def __init__(self, batching: Batching):
        self._batching = batching
        self.steps = batching.steps
        self.is_uniform: bool = isinstance(batching, Consecutive)
        self.dropped = batching.dropped

    def full_size(self, step: int) -> int:
        """Return the size of a full batch, which all batches have."""
        return self._batching.full_size(step)

    def sizes(self, step: int, count: int) -> list[int]:
        """Return the sizes of `count` batches from `step` on, padding included."""
        return [self.full_size(at) for at in range(step, step + count)]

    def indices(self, step: int, count: int) -> np.ndarray:
        """Return the examples of `count` batches from `step` on, padding included."""
        indices = self._batching.indices(step, count)
        sizes = self._batching.sizes(step, count)
        full = self.sizes(step, count)
        if sizes == full:
            return indices
        parts = np.split(indices, np.cumsum(sizes)[:-1])
        padded = [
            np.pad(part, (0, size - len(part)), "edge")
            for part, size in zip(parts, full, strict=True)
        ]
        return np.concatenate(padded)

    def count(self, epochs: float) -> int:
        """Return the number of batches in `epochs` epochs; the last may be padded."""
        return self._batching.count(epochs)

    def mask(self, step: int, count: int) -> np.ndarray:
        """Return 1 for each example of `count` batches from `step` on, and 0 for padding."""
        sizes = self._batching.sizes(step, count)
        rows = [
            np.arange(full) < size
            for size, full in zip(sizes, self.sizes(step, count), strict=True)
        ]
        return np.concatenate(rows).astype(np.float32)

    def length(self, step: int) -> int | None:
        """Return the padded length of features whose Pad has none; None for the longest."""
        return self._batching.length(step)

    def is_whole(self, count: int) -> bool:
        """Return True: all batches are full."""
        return True


def blank_padding(batch: Batch, mask: np.ndarray, ragged: Collection[str] = ()) -> Batch:
    """Return the batch with zeros in its padding, and with the mask unless it has one.

    So weights and lengths that the examples have are 0 in the padding too. Rows of the features in
    `ragged`, which are padded to one length later, become empty.
    """
    rows = np.flatnonzero(mask == 0)
    if len(rows):
        batch = {name: _blank(array, rows, name in ragged) for name, array in batch.items()}
    return batch if MASK in batch else batch | {MASK: mask}


def append_padding(batch: Batch, size: int) -> Batch:
    """Return the batch with rows of zeros at its end, up to `size` rows."""
    return {
        name: np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])
        for name, array in batch.items()
    }


def _blank(array: np.ndarray, rows: np.ndarray, is_ragged: bool) -> np.ndarray:
    blanked = array.copy()
    if array.dtype.hasobject:
        for row in rows:
            value = np.asarray(array[row])
            blanked[row] = value[:0] if is_ragged and value.ndim else np.zeros_like(value)
    else:
        blanked[rows] = np.zeros((), array.dtype)
    return blanked
