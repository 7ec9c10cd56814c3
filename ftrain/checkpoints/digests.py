"""Digests: short numbers that change when bytes do."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import google_crc32c
import ml_dtypes
import numpy as np
import xxhash

_THREADS = 2  # both digests let other threads run, and are bound by memory more than by arithmetic
_CHUNK = (
    1 << 20
)  # bytes of a file that are taken at once: few enough to stay in the processor's cache

T = TypeVar("T")
R = TypeVar("R")


def digest_of(array: np.ndarray) -> str:
    """128 bits of an array's values, in the order of its elements."""
    return xxhash.xxh3_128_hexdigest(bytes_of(array))  # pyright: ignore[reportArgumentType] - an array is a buffer


def bytes_of(array: np.ndarray) -> np.ndarray:
    """An array's memory, as it lies there if its elements are in order, or else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def crc32c_of(path: Path) -> str:
    """The crc32c of a file, as eight digits."""
    value, chunk = 0, np.empty(_CHUNK, np.uint8)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):  # pyright: ignore[reportArgumentType] - an array is a buffer
            value = google_crc32c.extend(value, chunk[:count])  # pyright: ignore[reportArgumentType] - a buffer too
    return f"{value:08x}"


def crc32c_of_text(text: str) -> str:
    return f"{google_crc32c.value(text.encode()):08x}"


def is_finite(array: np.ndarray) -> bool:
    """Whether no number of an array is infinite or not a number; whole numbers always are finite."""
    if array.dtype in (
        np.float16,
        ml_dtypes.bfloat16,
    ):  # numpy is slow at these: look at the bits of their exponents
        exponent = np.uint16(0x7C00 if array.dtype == np.float16 else 0x7F80)
        return not bool(((bytes_of(array).view(np.uint16) & exponent) == exponent).any())
    try:
        return bool(np.isfinite(array).all())
    except TypeError:  # int4 and its like
        return True


def in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`function` of every item, computed by a few threads, in order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))
