"""Permutations that are computed, not held: a bijection of the numbers below `length`, chosen by a key.

Each round multiplies by an odd number and adds another, modulo a power of two, and folds the high half of the bits into
the low half. Each of these can be undone, so that the whole is a bijection; it is applied again to what falls outside
of the range, which keeps it one (its values are followed along their cycle to the next one inside).
"""

import functools
from typing import NamedTuple

import numpy as np

_ROUNDS = 8  # fewer show in the differences of neighbours, for ranges of a few dozen numbers


class _Round(NamedTuple):
    factor: np.unsignedinteger
    addend: np.unsignedinteger


def permute(values: np.ndarray, length: int, key: tuple[int, ...]) -> np.ndarray:
    """Where the permutation of `length` numbers that belongs to the key puts each of the values."""
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
    mask, half = kind((1 << bits) - 1), kind((bits + 1) // 2)
    folded = np.empty_like(values)
    for factor, addend in rounds:  # in place: this is most of the time that shuffling takes
        values *= factor
        values += addend
        values &= mask
        np.right_shift(values, half, out=folded)
        values ^= folded
    return values


@functools.lru_cache(maxsize=64)
def _rounds(bits: int, key: tuple[int, ...]) -> tuple[_Round, ...]:
    kind, mask = _dtype(bits), (1 << bits) - 1
    drawn = np.random.SeedSequence(key).generate_state(2 * _ROUNDS, np.uint64).tolist()
    return tuple(
        _Round(kind(drawn[at] & mask | 1), kind(drawn[at + 1] & mask))
        for at in range(0, len(drawn), 2)
    )


def _dtype(bits: int) -> type[np.uint32] | type[np.uint64]:
    return np.uint32 if bits <= 32 else np.uint64
