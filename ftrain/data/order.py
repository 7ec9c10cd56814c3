"""Order: which example is at each position of the endless stream that batches are cut from.

Shuffling is a seeded permutation that is computed, not stored: a bijection of the integers below
`length`, chosen by a key. Each round multiplies by an odd number and adds another, modulo a power
of two, and folds the high half of the bits into the low half. Each of these can be inverted, so
the whole is a bijection. Results outside of the range are permuted again (cycle walking), which
keeps it a bijection.
"""

import functools
from collections.abc import Sized
from typing import Any, NamedTuple

import numpy as np

from ftrain.data.source import Source, describe

_BLOCK = 1 << 16  # positions that are ordered together: half a megabyte, and few calls
_BLOCKS_KEPT = 4
_ROUNDS = 8  # with fewer, neighbours in ranges of a few dozen numbers are correlated


def order_of(source: Any, positions: np.ndarray, seed: int, shuffle: bool) -> np.ndarray:
    """Return the index of the example at each position.

    This is the source's own order if it defines one. Otherwise epochs follow each other.
    """
    own = getattr(source, "order", None)
    if own is not None:
        return own(positions, seed, shuffle)
    epochs, offsets = np.divmod(positions, len(source))
    if shuffle:
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            offsets[inside] = permute(offsets[inside], len(source), (seed, epoch))
    return offsets


def check_has_no_order(source: Source, user: str) -> None:
    """Raise TypeError for a mixture: `user` reads by index and would ignore its weights."""
    if hasattr(source, "order"):
        raise TypeError(
            f"a {user} reads by index, so it would ignore the weights of {describe(source)}; "
            "apply it to each source, then mix the results"
        )


class Ordering:
    """The order of a source, computed a block at a time; the last few blocks are kept."""

    def __init__(self, source: Sized, seed: int, shuffle: bool, batch_size: int):
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        # A block of more than an epoch would be many small permutations.
        self._size = min(_BLOCK, max(batch_size, len(source)))
        self._blocks: dict[int, np.ndarray] = {}

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the examples at the positions from `start` to `stop`."""
        first, offset = divmod(start, self._size)
        if offset + stop - start <= self._size:  # nearly always
            return self._block(first)[offset : offset + stop - start]
        last = (stop - 1) // self._size
        whole = np.concatenate([self._block(number) for number in range(first, last + 1)])
        return whole[offset : offset + stop - start]

    def _block(self, number: int) -> np.ndarray:
        block = self._blocks.get(number)
        if block is None:
            block = self._compute(number * self._size, (number + 1) * self._size)
            block.flags.writeable = False  # callers get slices of it
            # A new dict, because several threads may read at once.
            kept = dict(list(self._blocks.items())[1 - _BLOCKS_KEPT :])
            self._blocks = kept | {number: block}
        return block

    def _compute(self, start: int, stop: int) -> np.ndarray:
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
        positions = np.arange(start, stop)
        if not self._shuffle:
            return positions
        return permute(positions, len(self._source), (self._seed, epoch))


class _Round(NamedTuple):
    factor: np.unsignedinteger
    addend: np.unsignedinteger


def permute(values: np.ndarray, length: int, key: tuple[int, ...]) -> np.ndarray:
    """Return where the permutation of `length` numbers given by `key` maps each value."""
    bits = max((length - 1).bit_length(), 1)
    rounds = _rounds(bits, key)
    mixed = _mix(values.astype(_dtype(bits)), bits, rounds)
    outside = np.flatnonzero(mixed >= length)
    while outside.size:
        again = _mix(mixed[outside], bits, rounds)
        mixed[outside] = again
        outside = outside[again >= length]
    return mixed.astype(np.int64)


def _mix(values: np.ndarray, bits: int, rounds: tuple[_Round, ...]) -> np.ndarray:
    kind = values.dtype.type
    mask = kind((1 << bits) - 1)
    half = kind((bits + 1) // 2)
    folded = np.empty_like(values)
    for factor, addend in rounds:  # in place: this is most of the cost of shuffling
        values *= factor
        values += addend
        values &= mask
        np.right_shift(values, half, out=folded)
        values ^= folded
    return values


@functools.lru_cache(maxsize=64)
def _rounds(bits: int, key: tuple[int, ...]) -> tuple[_Round, ...]:
    kind = _dtype(bits)
    mask = (1 << bits) - 1
    drawn = np.random.SeedSequence(key).generate_state(2 * _ROUNDS, np.uint64).tolist()
    return tuple(
        _Round(kind(drawn[at] & mask | 1), kind(drawn[at + 1] & mask))
        for at in range(0, len(drawn), 2)
    )


def _dtype(bits: int) -> type[np.uint32] | type[np.uint64]:
    return np.uint32 if bits <= 32 else np.uint64
