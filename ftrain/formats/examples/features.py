"""Feature specs: the shape and dtype of each feature, and how a column becomes arrays.

spec = {"image": Raw((28, 28), "uint8"), "label": Fixed(dtype="int32"), "words": Padded(length=40)}
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ftrain.formats.examples.columns import (
    ABSENT,
    BYTES,
    FLOAT,
    INT64,
    Column,
    as_objects,
    cut,
    pad_rows,
    split,
)
from ftrain.formats.examples.images import check_image_shape, decode_image
from ftrain.formats.examples.messages import number_kind

DType = str | type | np.dtype
Where = Callable[[int], str]  # names a record in errors

_OBJECTS = np.dtype(object)
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


class _SpecEntry:
    """The entry of a feature in a spec."""

    lengths: str | None = None  # the name of an array of lengths

    def outputs(self, name: str) -> list[str]:
        """Return the names of the arrays of feature `name`."""
        return [name, self.lengths] if self.lengths else [name]


@dataclasses.dataclass(frozen=True)
class Fixed(_SpecEntry):
    """Values of one shape in every record: (n, *shape).

    `default`, one value or an array of the shape, is the value of records without the feature.
    Without a default those are an error.
    """

    shape: tuple[int, ...] = ()
    dtype: DType = "float32"
    default: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _checked_shape(self.shape))
        _resolve_dtype(self.dtype)
        if self.default is not None:
            self._default_array()

    @property
    def kind(self) -> int:
        """The kind of list that holds the values."""
        return _kind_of(_resolve_dtype(self.dtype))

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        """Return the arrays of a column; SpecError if a record does not fit."""
        dtype = _resolve_dtype(self.dtype)
        size = math.prod(self.shape)
        wrong = column.counts != size
        missing = None
        if self.default is not None:
            missing = column.kinds == ABSENT  # an empty list is not missing, as in TensorFlow 1
            wrong &= ~missing
        if np.count_nonzero(wrong):
            raise self._count_error(name, column, where, int(wrong.argmax()))
        values = _convert(name, column, dtype, where)
        if missing is not None and np.count_nonzero(missing):
            filled = np.empty((len(missing), size), dtype)
            filled[missing] = self._default_array().reshape(size)
            filled[~missing] = values.reshape(np.count_nonzero(~missing), size)
            values = filled
        return {name: values.reshape(len(wrong), *self.shape)}

    def _count_error(self, name: str, column: Column, where: Where, record: int) -> SpecError:
        expected = f"expected {math.prod(self.shape)} (shape {self.shape})"
        if column.kinds[record] == ABSENT:
            return MissingFeatureError(where(record), name, expected, record)
        found = f"has {column.counts[record]} value{'' if column.counts[record] == 1 else 's'}"
        return SpecError(
            f"{where(record)}: feature {name} {found}, {expected}; "
            "Padded and Ragged take any number"
        )

    def _default_array(self) -> np.ndarray:
        value = _checked_value("default", self.default, self.dtype)
        try:
            return np.broadcast_to(value, self.shape)
        except ValueError:
            raise ValueError(
                f"default has shape {value.shape}, expected one value or shape {self.shape}"
            ) from None


@dataclasses.dataclass(frozen=True)
class Padded(_SpecEntry):
    """Any number of values, padded at the end: (n, length), or as long as the longest of the batch.

    `truncate` cuts longer records instead of raising. `lengths` names an int32 array of the
    original lengths. The pad of bytes is b"".
    """

    dtype: DType = "int64"
    length: int | None = None
    pad: Any = 0
    truncate: bool = False
    lengths: str | None = None

    def __post_init__(self) -> None:
        _check_length(self.length, self.truncate)
        _check_pad(self.pad_value, self.dtype)

    @property
    def kind(self) -> int:
        """The kind of list that holds the values."""
        return _kind_of(_resolve_dtype(self.dtype))

    @property
    def pad_value(self) -> Any:
        """The pad; b"" instead of the default 0 for bytes."""
        return _default_pad(self.pad, self.dtype)

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        """Return the arrays of a column; SpecError if a record does not fit."""
        values = _convert(name, column, _resolve_dtype(self.dtype), where)
        return _pad_records(self, name, values, column.counts, where)


@dataclasses.dataclass(frozen=True)
class Ragged(_SpecEntry):
    """Any number of values: an object array of n arrays, or with `flat` one array of all values.

    `lengths` names an int32 array of the n lengths; `flat` requires it.
    """

    dtype: DType = "int64"
    flat: bool = False
    lengths: str | None = None

    def __post_init__(self) -> None:
        _resolve_dtype(self.dtype)
        if self.flat and self.lengths is None:
            raise ValueError(
                "Ragged(flat=True) needs the lengths of the records; name them with lengths='...'"
            )

    @property
    def kind(self) -> int:
        """The kind of list that holds the values."""
        return _kind_of(_resolve_dtype(self.dtype))

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        """Return the arrays of a column; SpecError if a record does not fit."""
        values = _convert(name, column, _resolve_dtype(self.dtype), where)
        arrays = {name: values if self.flat else as_objects(split(values, column.counts))}
        return arrays | _length_array(self, column.counts)


@dataclasses.dataclass(frozen=True)
class Raw(_SpecEntry):
    """One bytes value: the little-endian bytes of an array. A batch of n has shape (n, *shape)."""

    shape: tuple[int, ...]
    dtype: DType = "uint8"
    kind = BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _checked_shape(self.shape))
        if _resolve_dtype(self.dtype) == _OBJECTS:
            raise TypeError(
                "Raw holds numbers, not bytes; use Fixed((), 'bytes') for unconverted bytes"
            )

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        """Return the arrays of a column; SpecError if a record does not fit."""
        _check_single(name, column, where, "Raw")
        dtype = _resolve_dtype(self.dtype)
        expected = math.prod(self.shape) * dtype.itemsize
        for record, value in enumerate(column.values):
            if len(value) != expected:
                raise SpecError(
                    f"{where(record)}: feature {name} has {len(value)} bytes, expected {expected} "
                    f"(shape {self.shape} of {dtype}); use the shape and dtype it was written with"
                )
        values = np.frombuffer(bytearray().join(column.values), np.uint8)
        values = (
            values != 0
            if dtype.kind == "b"
            else values.view(dtype.newbyteorder("<")).astype(dtype, copy=False)
        )
        return {name: values.reshape(len(column.values), *self.shape)}


@dataclasses.dataclass(frozen=True)
class Image(_SpecEntry):
    """One bytes value with a PNG or JPEG image of `shape` (height, width, channels): (n, *shape).

    The array is uint8. 1 channel is gray, 3 are RGB, 4 are RGBA. The orientation tag of a file is
    not applied. Needs Pillow.
    """

    shape: tuple[int, int, int]
    kind = BYTES

    def __post_init__(self) -> None:
        check_image_shape(self.shape)
        object.__setattr__(self, "shape", tuple(self.shape))

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        """Return the arrays of a column; SpecError if a record does not fit."""
        _check_single(name, column, where, "Image")
        images = np.empty((len(column.values), *self.shape), np.uint8)
        for record, value in enumerate(column.values):
            try:
                images[record] = decode_image(value, self.shape)
            except ValueError as error:
                raise SpecError(f"{where(record)}: feature {name} {error}") from None
        return {name: images}


Entry = Fixed | Padded | Ragged | Raw | Image


@dataclasses.dataclass(frozen=True)
class Steps(_SpecEntry):
    """Any number of steps of one shape, padded at the end: (n, length, *shape).

    Without `length`, that of the longest record of the batch.

    `truncate` cuts longer records instead of raising. `lengths` names an int32 array of the
    original numbers of steps. The default of `step` is the value of a step without values.
    """

    step: Fixed
    length: int | None = None
    pad: Any = 0
    truncate: bool = False
    lengths: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.step, Fixed):
            raise TypeError(
                f"step is {self.step!r}, expected a Fixed; "
                "steps of varying size are Ragged, without Steps"
            )
        _check_length(self.length, self.truncate)
        shape = _checked_value("pad", self.pad_value, self.step.dtype).shape
        if shape not in ((), self.step.shape):
            raise ValueError(
                f"pad has shape {shape}, expected a single value or the shape of a step, "
                f"{self.step.shape}"
            )

    @property
    def pad_value(self) -> Any:
        """The pad; b"" instead of the default 0 for bytes."""
        return _default_pad(self.pad, self.step.dtype)

    def arrays(
        self, name: str, values: np.ndarray, counts: np.ndarray, where: Where
    ) -> dict[str, np.ndarray]:
        """Return the arrays from the values of all steps and the numbers of steps per record."""
        return _pad_records(self, name, values, counts, where)


def _pad_records(
    entry: Padded | Steps, name: str, values: np.ndarray, counts: np.ndarray, where: Where
) -> dict[str, np.ndarray]:
    """Pad each record to one length; cut a longer one, or raise SpecError."""
    if entry.length is not None and (long := counts > entry.length).any():
        if not entry.truncate:
            record = int(long.argmax())
            is_list = isinstance(entry, Steps)
            feature = f"feature {'list ' if is_list else ''}{name}"
            found = f"has {counts[record]} {'steps' if is_list else 'values'}"
            raise SpecError(
                f"{where(record)}: {feature} {found}, expected at most {entry.length}; "
                f"{type(entry).__name__}(truncate=True) cuts them"
            )
        values, counts = cut(values, counts, entry.length)
    arrays = {name: pad_rows(values, counts, entry.length, entry.pad_value)}
    return arrays | _length_array(entry, counts)


def _length_array(entry: _SpecEntry, counts: np.ndarray) -> dict[str, np.ndarray]:
    return {entry.lengths: counts.astype(np.int32)} if entry.lengths else {}


def _check_single(name: str, column: Column, where: Where, entry: str) -> None:
    wrong = column.counts != 1
    if wrong.any():
        record = int(wrong.argmax())
        found = f"has {column.counts[record] or 'no'} values"
        raise SpecError(
            f"{where(record)}: feature {name} {found}, but {entry} expects one bytes value; "
            "use Ragged('bytes') for any number"
        )


@functools.cache
def _resolve_dtype(dtype: DType) -> np.dtype:
    """Return the dtype of a name or a type: floats, integers, bool, or objects for "bytes"."""
    if dtype is bytes or (isinstance(dtype, str) and dtype == "bytes"):
        return _OBJECTS
    try:
        found = np.dtype(
            getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype
        ).newbyteorder("=")
    except TypeError:
        found = None
    if found is None or not (number_kind(found) or found.kind == "b"):
        raise TypeError(f"dtype is {dtype!r}, expected floats, integers, bool or 'bytes'")
    return found


def _kind_of(dtype: np.dtype) -> int:
    """Return the kind of list that holds values of this dtype."""
    if dtype == _OBJECTS:
        return BYTES
    return FLOAT if number_kind(dtype) == "float" else INT64


def _checked_shape(shape: Any) -> tuple[int, ...]:
    """Return the shape as a tuple; ValueError if it is not one."""
    whole = isinstance(shape, tuple | list) and all(
        type(size) is int and size >= 0 for size in shape
    )
    if not whole or math.prod(shape) > _LARGEST_SHAPE:
        raise ValueError(
            f"shape is {shape!r}, expected a tuple of sizes such as (28, 28), or () for one value"
        )
    return tuple(shape)


def _check_length(length: int | None, truncate: bool) -> None:
    """Raise ValueError for an invalid length, or truncation without one."""
    if length is not None and (type(length) is not int or length < 0):
        raise ValueError(
            f"length is {length!r}, expected an integer >= 0, or None for the longest of the batch"
        )
    if truncate and length is None:
        raise ValueError("truncate=True needs a length; pass length=...")


def _default_pad(pad: Any, dtype: DType) -> Any:
    """Return the pad; the default 0 becomes b"" for bytes."""
    return b"" if _resolve_dtype(dtype) == _OBJECTS and type(pad) is int and pad == 0 else pad


def _check_pad(pad: Any, dtype: DType) -> None:
    """Raise ValueError unless the pad is one value of the dtype."""
    if _checked_value("pad", pad, dtype).ndim:
        raise ValueError(f"pad is {pad!r}, expected a single value")


def _checked_value(what: str, value: Any, dtype: DType) -> np.ndarray:
    """Return a default or a pad in its dtype; only the precision of a float may change."""
    resolved = _resolve_dtype(dtype)
    array = np.asarray(value, object if resolved == _OBJECTS else None)
    if resolved == _OBJECTS:
        fits = all(isinstance(item, bytes) for item in array.ravel())
    elif _kind_of(resolved) == FLOAT:
        fits = bool(number_kind(array.dtype))
    else:
        low, high = _limits(resolved)
        fits = (number_kind(array.dtype) == "integer" or array.dtype == bool) and bool(
            ((array >= low) & (array <= high)).all()
        )
    if not fits:
        name = "bytes" if resolved == _OBJECTS else resolved
        raise ValueError(f"{what} is {value!r}, which is not a value of dtype {name}")
    return _cast(array, resolved)


def _convert(name: str, column: Column, dtype: np.dtype, where: Where) -> np.ndarray:
    """Return the values in `dtype`; SpecError if an integer does not fit."""
    values = column.values
    if values.dtype == np.int64 and dtype != np.int64:
        low, high = _limits(dtype)
        if len(values) and (values.min() < low or values.max() > high):
            place = int(((values < low) | (values > high)).argmax())
            record = int(np.searchsorted(np.cumsum(column.counts), place, side="right"))
            raise SpecError(
                f"{where(record)}: feature {name} has the value {values[place]}, "
                f"expected {low} to {high} ({dtype}); use a wider dtype in the spec"
            )
    return _cast(values, dtype)


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
