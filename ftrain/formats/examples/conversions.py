"""Conversions: values of a column in the dtype that a spec names, cut, padded or split by record."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ftrain.formats.examples.columns import BYTES, FLOAT, INT64, Column, largest
from ftrain.formats.examples.messages import number_kind

DType = str | type | np.dtype
Where = Callable[[int], str]  # names a record for errors

OBJECTS = np.dtype(object)
_LARGEST_SHAPE = 1 << 40


class SpecError(ValueError):
    """Records that are not what the spec says."""


class MissingFeatureError(SpecError):
    """A record without a feature that has no default."""

    def __init__(
        self, place: str, feature: str, wanted: str, record: int, there: Sequence[str] = ()
    ):
        names = f"; the record has {', '.join(sorted(there))}" if there else ""
        super().__init__(
            f"{place}: feature {feature} has no values, {wanted}{names}; Fixed(default=...) gives some"
        )
        self.place, self.feature, self.wanted, self.record, self.there = (
            place,
            feature,
            wanted,
            record,
            there,
        )

    def __reduce__(self) -> tuple:
        return (
            MissingFeatureError,
            (self.place, self.feature, self.wanted, self.record, self.there),
            vars(self),
        )

    def told_with(self, there: Sequence[str]) -> "MissingFeatureError":
        """The same, with the names of the features that the record has."""
        return MissingFeatureError(self.place, self.feature, self.wanted, self.record, there)


@functools.cache
def resolve_dtype(dtype: DType) -> np.dtype:
    """The dtype that a name, a type or a dtype means: floats, integers, bool, or objects for "bytes"."""
    if dtype is bytes or (isinstance(dtype, str) and dtype == "bytes"):
        return OBJECTS
    try:
        found = np.dtype(
            getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype
        ).newbyteorder("=")
    except TypeError:
        found = None
    if found is None or not (number_kind(found) or found.kind == "b"):
        raise TypeError(f"dtype is {dtype!r}, wanted floats, integers, bool or 'bytes'")
    return found


def kind_of(dtype: np.dtype) -> int:
    """The kind of list that has values for this dtype."""
    if dtype == OBJECTS:
        return BYTES
    return FLOAT if number_kind(dtype) == "float" else INT64


def checked_shape(shape: Any) -> tuple[int, ...]:
    whole = isinstance(shape, tuple | list) and all(
        type(size) is int and size >= 0 for size in shape
    )
    if not whole or math.prod(shape) > _LARGEST_SHAPE:
        raise ValueError(
            f"shape is {shape!r}, wanted a tuple of sizes such as (28, 28), or () for one value"
        )
    return tuple(shape)


def check_length(length: int | None, truncate: bool) -> None:
    if length is not None and (type(length) is not int or length < 0):
        raise ValueError(
            f"length is {length!r}, wanted an integer from 0, or None for the longest of the batch"
        )
    if truncate and length is None:
        raise ValueError("truncate=True cuts at a length; give it with length=...")


def default_pad(pad: Any, dtype: DType) -> Any:
    """Bytes are padded with b"" where numbers are with 0."""
    return b"" if resolve_dtype(dtype) == OBJECTS and type(pad) is int and pad == 0 else pad


def check_pad(pad: Any, dtype: DType) -> None:
    if checked_value("pad", pad, dtype).ndim:
        raise ValueError(f"pad is {pad!r}, wanted a single value")


def checked_value(what: str, value: Any, dtype: DType) -> np.ndarray:
    """A default or a pad in its dtype; it must not change its value by that, but for a float's precision."""
    resolved = resolve_dtype(dtype)
    array = np.asarray(value, object if resolved == OBJECTS else None)
    if resolved == OBJECTS:
        fits = all(isinstance(item, bytes) for item in array.ravel())
    elif kind_of(resolved) == FLOAT:
        fits = bool(number_kind(array.dtype))
    else:
        low, high = _limits(resolved)
        fits = (number_kind(array.dtype) == "integer" or array.dtype == bool) and bool(
            ((array >= low) & (array <= high)).all()
        )
    if not fits:
        name = "bytes" if resolved == OBJECTS else resolved
        raise ValueError(
            f"{what} is {value!r}, which is no value of dtype {name}; give one that is"
        )
    return _cast(array, resolved)


def convert(name: str, column: Column, dtype: np.dtype, where: Where) -> np.ndarray:
    """The values in `dtype`; SpecError if an integer does not fit into it."""
    values = column.values
    if values.dtype == np.int64 and dtype != np.int64:
        low, high = _limits(dtype)
        if len(values) and (values.min() < low or values.max() > high):
            place = int(((values < low) | (values > high)).argmax())
            record = int(np.searchsorted(np.cumsum(column.counts), place, side="right"))
            what = f"feature {name} has the value {values[place]}, wanted {low} to {high} ({dtype})"
            raise SpecError(f"{where(record)}: {what}; give the spec a wider dtype")
    return _cast(values, dtype)


def cut(values: np.ndarray, counts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `length` values of each record, from its first."""
    starts = np.cumsum(counts) - counts
    places = np.arange(len(values)) - np.repeat(starts, counts)
    return values[places < length], np.minimum(counts, length)


def pad_rows(values: np.ndarray, counts: np.ndarray, length: int | None, pad: Any) -> np.ndarray:
    """(n, length, ...) of values one after the other (..., the rest of their shape), `counts` to a row."""
    length = largest(counts) if length is None else length
    if (counts == length).all():
        return values.reshape(len(counts), length, *values.shape[1:])
    rows = np.empty((len(counts), length, *values.shape[1:]), values.dtype)
    if np.ndim(pad):
        rows[...] = pad
    else:
        rows.fill(pad)  # np.full would lose zeros at the end of bytes
    rows[np.arange(length) < counts[:, None]] = values
    return rows


def split(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """The values of each record."""
    ends = np.cumsum(counts)
    return [
        values[start:end]
        for start, end in zip((ends - counts).tolist(), ends.tolist(), strict=True)
    ]


def _limits(dtype: np.dtype) -> tuple[int, int]:
    """The smallest and the largest value, as far as int64 has them."""
    if dtype.kind == "b":
        return 0, 1
    limits, widest = ml_dtypes.iinfo(dtype), np.iinfo(np.int64)
    return max(int(limits.min), widest.min), min(int(limits.max), widest.max)


def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):  # a float that is too large becomes infinite
        return values.astype(dtype)
