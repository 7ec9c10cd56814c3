"""Inspecting: what the values of a leaf are like, and how far those of two are apart."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_CHUNK = 1 << 20  # elements that are looked at together, in double precision


class Statistics(NamedTuple):
    mean: float
    std: float
    min: float
    max: float
    zeros: float  # the share of elements that are zero
    not_finite: int  # how many are; the other figures leave them out


class Difference(NamedTuple):
    absolute: float  # the largest
    relative: float  # the largest, to the larger of the two values
    elements: int  # that differ; not-a-number equals not-a-number


def describe_values(array: np.ndarray) -> Statistics | None:
    """The statistics of numbers, of complex ones those of their sizes; None of text, and of what has no elements."""
    if array.dtype.kind in "OSU" or not array.size:
        return None
    count, total, squares, zeros, not_finite = 0, 0.0, 0.0, 0, 0
    low, high = math.inf, -math.inf
    for (part,) in _chunks(array):
        chunk = np.abs(part).astype(np.float64) if part.dtype.kind == "c" else _doubles(part)
        finite = chunk[np.isfinite(chunk)]
        not_finite += chunk.size - finite.size
        zeros += int(np.count_nonzero(chunk == 0))
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            # The mean and the sum of squared distances from it, put together chunk by chunk without cancellation.
            mean, seen = float(finite.mean()), count + finite.size
            squares += float(((finite - mean) ** 2).sum())
            if count:
                squares += (mean - total / count) ** 2 * count * finite.size / seen
            count, total = seen, total + float(finite.sum())
    if not count:
        return Statistics(math.nan, math.nan, math.nan, math.nan, zeros / array.size, not_finite)
    return Statistics(
        total / count, math.sqrt(squares / count), low, high, zeros / array.size, not_finite
    )


def compare_values(left: np.ndarray, right: np.ndarray) -> Difference:
    """How far two arrays of one shape and dtype are apart."""
    if left.dtype.kind in "OSU":
        differing = int(np.count_nonzero(left != right))
        return Difference(math.inf if differing else 0.0, math.inf if differing else 0.0, differing)
    absolute, relative, differing = 0.0, 0.0, 0
    for one, other in _chunks(left, right):
        differs = one != other  # exact, also for whole numbers that a double cannot hold
        if left.dtype.kind not in "biu":
            differs &= ~(np.isnan(one) & np.isnan(other))
        if differs.any():
            gap, larger = _gaps(_doubles(one[differs]), _doubles(other[differs]))
            differing += int(differs.sum())
            absolute, relative = (
                max(absolute, float(gap.max())),
                max(relative, float((gap / larger).max())),
            )
    return Difference(absolute, relative, differing)


def _gaps(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far apart values are, without limit if one of two is not a number, and the size of the larger one."""
    with np.errstate(invalid="ignore", over="ignore"):
        gap, larger = np.abs(one - other), np.maximum(np.abs(one), np.abs(other))
    gap = np.where(np.isnan(gap), math.inf, gap)
    return gap, np.where(np.isfinite(larger) & (larger > 0), larger, 1.0)


def _chunks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Arrays side by side, some elements at a time."""
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _CHUNK):
        yield tuple(each[start : start + _CHUNK] for each in flat)


def _doubles(chunk: np.ndarray) -> np.ndarray:
    return chunk.astype(np.complex128 if chunk.dtype.kind == "c" else np.float64)
