"""Conversions: values of a column in the dtype of a spec, cut, padded or split by record."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ftrain.formats.examples.columns import BYTES, FLOAT, INT64, Column, largest
from ftrain.formats.examples.messages import number_kind

DType = str | type | np.dtype
Where = Callable[[int], str]  # names a record in errors

OBJECTS = np.dtype(object)
_LARGEST_SHAPE = 1 << 40


class SpecError(ValueError):
    """Records that do not match the spec."""


class MissingFeatureError(SpecError):
    """A record without a feature that has no default."""

    def __init__(
        self, place: str, feature: str, expected: str, record: int, present: Sequence[str] = ()
    ):
        names = f"; the record has {', '.join(sorted(present))}" if present else ""
        super().__init__(
            f"{place}: feature {feature} has no values, {expected}{names}; "
            "Fixed(default=...) fills it"
        )
        self.place = place
        self.feature = feature
        self.expected = expected
        self.record = record
        self.present = present

    def __reduce__(self) -> tuple:
        return (
            MissingFeatureError,
            (self.place, self.feature, self.expected, self.record, self.present),
            vars(self),
        )

    def with_present(self, present: Sequence[str]) -> "MissingFeatureError":
        """Return the same error with the names of the features that the record has."""
        return MissingFeatureError(self.place, self.feature, self.expected, self.record, present)


@functools.cache
def resolve_dtype(dtype: DType) -> np.dtype:
    """Return the dtype of a name or a type: floats, integers, bool, or objects for "bytes"."""
    if dtype is bytes or (isinstance(dtype, str) and dtype == "bytes"):
        return OBJECTS
    try:
        found = np.dtype(
            getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype
        ).newbyteorder("=")
    except TypeError:
        found = None
    if found is None or not (number_kind(found) or found.kind == "b"):
        raise TypeError(f"dtype is {dtype!r}, expected floats, integers, bool or 'bytes'")
    return found


def kind_of(dtype: np.dtype) -> int:
    """Return the kind of list that holds values of this dtype."""
    if dtype == OBJECTS:
        return BYTES
    return FLOAT if number_kind(dtype) == "float" else INT64


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return the shape as a tuple; ValueError if it is not one."""
    whole = isinstance(shape, tuple | list) and all(
        type(size) is int and size >= 0 for size in shape
    )
    if not whole or math.prod(shape) > _LARGEST_SHAPE:
        raise ValueError(
            f"shape is {shape!r}, expected a tuple of sizes such as (28, 28), or () for one value"
        )
    return tuple(shape)


def check_length(length: int | None, truncate: bool) -> None:
    """Raise ValueError for an invalid length, or truncation without one."""
    if length is not None and (type(length) is not int or length < 0):
        raise ValueError(
            f"length is {length!r}, expected an integer >= 0, or None for the longest of the batch"
        )
    if truncate and length is None:
        raise ValueError("truncate=True needs a length; pass length=...")


def default_pad(pad: Any, dtype: DType) -> Any:
    """Return the pad; the default 0 becomes b"" for bytes."""
    return b"" if resolve_dtype(dtype) == OBJECTS and type(pad) is int and pad == 0 else pad


def check_pad(pad: Any, dtype: DType) -> None:
    """Raise ValueError unless the pad is one value of the dtype."""
    if checked_value("pad", pad, dtype).ndim:
        raise ValueError(f"pad is {pad!r}, expected a single value")


def checked_value(what: str, value: Any, dtype: DType) -> np.ndarray:
    """Return a default or a pad in its dtype, which may only change the precision of a float."""
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
        raise ValueError(f"{what} is {value!r}, which is not a value of dtype {name}")
    return _cast(array, resolved)


def convert(name: str, column: Column, dtype: np.dtype, where: Where) -> np.ndarray:
    """Return the values in `dtype`; SpecError if an integer does not fit."""
    values = column.values
    if values.dtype == np.int64 and dtype != np.int64:
        low, high = _limits(dtype)
        if len(values) and (values.min() < low or values.max() > high):
            place = int(((values < low) | (values > high)).argmax())
            record = int(np.searchsorted(np.cumsum(column.counts), place, side="right"))
            raise SpecError(
                f"{where(record)}: feature {name} has the value {values[place]}, "
                f"expected {low} to {high} ({dtype}); give the spec a wider dtype"
            )
    return _cast(values, dtype)


def cut(values: np.ndarray, counts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `length` values of each record, and their counts."""
    starts = np.cumsum(counts) - counts
    places = np.arange(len(values)) - np.repeat(starts, counts)
    return values[places < length], np.minimum(counts, length)


def pad_rows(values: np.ndarray, counts: np.ndarray, length: int | None, pad: Any) -> np.ndarray:
    """Return an array (n, length, ...) from concatenated values, `counts` of them per row."""
    length = largest(counts) if length is None else length
    if (counts == length).all():
        return values.reshape(len(counts), length, *values.shape[1:])
    rows = np.empty((len(counts), length, *values.shape[1:]), values.dtype)
    if np.ndim(pad):
        rows[...] = pad
    else:
        rows.fill(pad)  # np.full would drop trailing zero bytes
    rows[np.arange(length) < counts[:, None]] = values
    return rows


def split(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Return the values of each record."""
    ends = np.cumsum(counts)
    return [
        values[start:end]
        for start, end in zip((ends - counts).tolist(), ends.tolist(), strict=True)
    ]


def _limits(dtype: np.dtype) -> tuple[int, int]:
    """Return the smallest and the largest value of the dtype within int64."""
    if dtype.kind == "b":
        return 0, 1
    limits = ml_dtypes.iinfo(dtype)
    widest = np.iinfo(np.int64)
    return max(int(limits.min), widest.min), min(int(limits.max), widest.max)


def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):  # too large floats become infinite
        return values.astype(dtype)
