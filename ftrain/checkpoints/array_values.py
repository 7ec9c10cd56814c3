"""Values of arrays and files: digests, non-finite checks, statistics and differences."""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import google_crc32c
import ml_dtypes
import numpy as np
import xxhash

_THREADS = 2  # digests release the GIL, and are bound by memory more than by arithmetic
_FILE_CHUNK = 1 << 20  # bytes read at a time: few enough to stay in the processor's cache
_ARRAY_CHUNK = 1 << 20  # elements converted to double precision at a time

T = TypeVar("T")
R = TypeVar("R")


class Statistics(NamedTuple):
    """What the finite elements of an array are like."""

    mean: float
    std: float
    min: float
    max: float
    zeros: float  # the share of elements that are zero
    not_finite: int  # number of non-finite elements


class Difference(NamedTuple):
    """How far two arrays are apart."""

    absolute: float  # the largest
    relative: float  # the largest, relative to the larger of the two values
    elements: int  # number of elements that differ; NaN equals NaN


def digest_of(array: np.ndarray) -> str:
    """Return a 128-bit digest of an array's values, in the order of its elements."""
    return xxhash.xxh3_128_hexdigest(_as_bytes(array))  # pyright: ignore[reportArgumentType] - an array is a buffer


def crc32c_of(path: Path) -> str:
    """Return the crc32c of a file as eight hexadecimal digits."""
    value = 0
    chunk = np.empty(_FILE_CHUNK, np.uint8)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):  # pyright: ignore[reportArgumentType] - an array is a buffer
            value = google_crc32c.extend(value, chunk[:count])  # pyright: ignore[reportArgumentType] - a buffer too
    return f"{value:08x}"


def crc32c_of_text(text: str) -> str:
    """Return the crc32c of a text in UTF-8 as eight hexadecimal digits."""
    return f"{google_crc32c.value(text.encode()):08x}"


def is_finite(array: np.ndarray) -> bool:
    """Return True if no element is infinite or NaN; integers always are finite."""
    if array.dtype in (np.float16, ml_dtypes.bfloat16):
        # numpy is slow at these types, so look at the bits of the exponents.
        exponent = np.uint16(0x7C00 if array.dtype == np.float16 else 0x7F80)
        return not bool(((_as_bytes(array).view(np.uint16) & exponent) == exponent).any())
    try:
        return bool(np.isfinite(array).all())
    except TypeError:  # int4 and similar types
        return True


def in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Map `function` over the items with a few threads; results are in order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


def describe_values(array: np.ndarray) -> Statistics | None:
    """Return statistics of the elements, of complex ones those of their absolute values.

    Returns None for text and for arrays without elements.
    """
    if array.dtype.kind in "OSU" or not array.size:
        return None
    count = 0
    total = 0.0
    squares = 0.0  # sum of squared distances from the mean
    zeros = 0
    not_finite = 0
    low = math.inf
    high = -math.inf
    for (part,) in _chunks(array):
        chunk = np.abs(part).astype(np.float64) if part.dtype.kind == "c" else _as_doubles(part)
        finite = chunk[np.isfinite(chunk)]
        not_finite += chunk.size - finite.size
        zeros += int(np.count_nonzero(chunk == 0))
        if finite.size:
            low = min(low, float(finite.min()))
            high = max(high, float(finite.max()))
            # Combine means and squares chunk by chunk, without cancellation.
            mean = float(finite.mean())
            seen = count + finite.size
            squares += float(((finite - mean) ** 2).sum())
            if count:
                squares += (mean - total / count) ** 2 * count * finite.size / seen
            count = seen
            total += float(finite.sum())
    share = zeros / array.size
    if not count:
        return Statistics(math.nan, math.nan, math.nan, math.nan, share, not_finite)
    return Statistics(total / count, math.sqrt(squares / count), low, high, share, not_finite)


def compare_values(left: np.ndarray, right: np.ndarray) -> Difference:
    """Return the difference of two arrays of the same shape and dtype."""
    if left.dtype.kind in "OSU":
        differing = int(np.count_nonzero(left != right))
        distance = math.inf if differing else 0.0
        return Difference(distance, distance, differing)
    absolute = 0.0
    relative = 0.0
    differing = 0
    for one, other in _chunks(left, right):
        differs = one != other  # exact, also for integers that a double cannot represent
        if left.dtype.kind not in "biu":
            differs &= ~(np.isnan(one) & np.isnan(other))
        if differs.any():
            gap, larger = _gaps(_as_doubles(one[differs]), _as_doubles(other[differs]))
            differing += int(differs.sum())
            absolute = max(absolute, float(gap.max()))
            relative = max(relative, float((gap / larger).max()))
    return Difference(absolute, relative, differing)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the memory of an array, without a copy if its elements are contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _gaps(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return distances, infinite where one value is NaN, and the sizes of the larger values."""
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(one - other)
        larger = np.maximum(np.abs(one), np.abs(other))
    gap = np.where(np.isnan(gap), math.inf, gap)
    return gap, np.where(np.isfinite(larger) & (larger > 0), larger, 1.0)


def _chunks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Iterate over arrays of the same size side by side, some elements at a time."""
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _ARRAY_CHUNK):
        yield tuple(each[start : start + _ARRAY_CHUNK] for each in flat)


def _as_doubles(chunk: np.ndarray) -> np.ndarray:
    return chunk.astype(np.complex128 if chunk.dtype.kind == "c" else np.float64)
