"""Order: which example stands at each position of the endless stream that batches are cut from."""

from typing import Any

import numpy as np

from ftrain.data.permutation import permute

_BLOCK = (
    1 << 16
)  # positions that are put in order together: half a megabyte, and few calls for each


def order_of(source: Any, positions: np.ndarray, seed: int, shuffle: bool) -> np.ndarray:
    """The index of the example at each position: a source's own order, if it has one, or one epoch after the other."""
    own = getattr(source, "order", None)
    if own is not None:
        return own(positions, seed, shuffle)
    epochs, offsets = np.divmod(positions, len(source))
    if shuffle:
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            offsets[inside] = permute(offsets[inside], len(source), (seed, epoch))
    return offsets


class Ordering:
    """The order of a source, computed a block at a time, of which the last few are kept."""

    def __init__(self, source: Any, seed: int, shuffle: bool, batch_size: int):
        self._source, self._seed, self._shuffle = source, seed, shuffle
        self._size = min(
            _BLOCK, max(batch_size, len(source))
        )  # more than an epoch would be many small permutations
        self._blocks: dict[int, np.ndarray] = {}

    def indices(self, start: int, stop: int) -> np.ndarray:
        """The examples at the positions from `start` to `stop`."""
        first, offset = divmod(start, self._size)
        if offset + stop - start <= self._size:  # nearly always
            return self._block(first)[offset : offset + stop - start]
        last = (stop - 1) // self._size
        whole = np.concatenate([self._block(number) for number in range(first, last + 1)])
        return whole[offset : offset + stop - start]

    def _block(self, number: int) -> np.ndarray:
        found = self._blocks.get(number)
        if found is None:
            found = self._put_in_order(number * self._size, (number + 1) * self._size)
            found.flags.writeable = False  # slices of it are handed out
            kept = dict(
                list(self._blocks.items())[-3:]
            )  # a new dict: several threads may read at once
            self._blocks = kept | {number: found}
        return found

    def _put_in_order(self, start: int, stop: int) -> np.ndarray:
        if hasattr(self._source, "order"):
            return order_of(self._source, np.arange(start, stop), self._seed, self._shuffle)
        length = len(self._source)
        parts = [
            self._part_of_epoch(
                epoch, max(start - epoch * length, 0), min(stop - epoch * length, length)
            )
            for epoch in range(start // length, (stop - 1) // length + 1)
        ]
        return np.concatenate(parts)

    def _part_of_epoch(self, epoch: int, start: int, stop: int) -> np.ndarray:
        places = np.arange(start, stop)
        return permute(places, len(self._source), (self._seed, epoch)) if self._shuffle else places
