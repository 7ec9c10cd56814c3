"""Feature specs: the shape and dtype of each feature, and how a column becomes arrays.

spec = {"image": Raw((28, 28), "uint8"), "label": Fixed(dtype="int32"), "words": Padded(length=40)}
"""

import dataclasses
import math
from typing import Any

import numpy as np

from ftrain.formats.examples.columns import ABSENT, BYTES, KIND_NAMES, Column, as_objects
from ftrain.formats.examples.conversions import (
    OBJECTS,
    DType,
    MissingFeatureError,
    SpecError,
    Where,
    check_length,
    check_pad,
    checked_shape,
    checked_value,
    convert,
    cut,
    default_pad,
    kind_of,
    pad_rows,
    resolve_dtype,
    split,
)
from ftrain.formats.examples.images import check_image_shape, decode_image


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Values of one shape in every record: (n, *shape).

    `default`, one value or an array of the shape, fills in for records without the feature; without
    it they are an error.
    """

    shape: tuple[int, ...] = ()
    dtype: DType = "float32"
    default: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape))
        resolve_dtype(self.dtype)
        if self.default is not None:
            self._filling()

    @property
    def kind(self) -> int:
        """The kind of list that holds the values."""
        return kind_of(resolve_dtype(self.dtype))

    def outputs(self, name: str) -> list[str]:
        """Return the names of the arrays."""
        return [name]

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        """Return the arrays of a column; SpecError if a record does not fit."""
        dtype = resolve_dtype(self.dtype)
        size = math.prod(self.shape)
        wrong = column.counts != size
        missing = None
        if self.default is not None:
            missing = column.kinds == ABSENT  # an empty list is not missing, as in TensorFlow 1
            wrong &= ~missing
        if np.count_nonzero(wrong):
            raise self._wrong_count(name, column, where, int(wrong.argmax()))
        values = convert(name, column, dtype, where)
        if missing is not None and np.count_nonzero(missing):
            filled = np.empty((len(missing), size), dtype)
            filled[missing] = self._filling().reshape(size)
            filled[~missing] = values.reshape(np.count_nonzero(~missing), size)
            values = filled
        return {name: values.reshape(len(wrong), *self.shape)}

    def _wrong_count(self, name: str, column: Column, where: Where, record: int) -> SpecError:
        expected = f"expected {math.prod(self.shape)} (shape {self.shape})"
        if column.kinds[record] == ABSENT:
            return MissingFeatureError(where(record), name, expected, record)
        found = f"has {column.counts[record]} value{'' if column.counts[record] == 1 else 's'}"
        return SpecError(
            f"{where(record)}: feature {name} {found}, {expected}; "
            "Padded and Ragged take any number"
        )

    def _filling(self) -> np.ndarray:
        value = checked_value("default", self.default, self.dtype)
        try:
            return np.broadcast_to(value, self.shape)
        except ValueError:
            raise ValueError(
                f"default has shape {value.shape}, expected one value or shape {self.shape}"
            ) from None


@dataclasses.dataclass(frozen=True)
class Padded:
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
        check_length(self.length, self.truncate)
        check_pad(self.filling, self.dtype)

    @property
    def kind(self) -> int:
        """The kind of list that holds the values."""
        return kind_of(resolve_dtype(self.dtype))

    @property
    def filling(self) -> Any:
        """The pad in the kind of the values."""
        return default_pad(self.pad, self.dtype)

    def outputs(self, name: str) -> list[str]:
        """Return the names of the arrays."""
        return [name, self.lengths] if self.lengths else [name]

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        """Return the arrays of a column; SpecError if a record does not fit."""
        values = convert(name, column, resolve_dtype(self.dtype), where)
        counts = column.counts
        if self.length is not None and (long := counts > self.length).any():
            if not self.truncate:
                record = int(long.argmax())
                found = f"has {counts[record]} values, expected at most {self.length}"
                raise SpecError(
                    f"{where(record)}: feature {name} {found}; Padded(truncate=True) cuts them"
                )
            values, counts = cut(values, counts, self.length)
        arrays = {name: pad_rows(values, counts, self.length, self.filling)}
        return arrays | ({self.lengths: counts.astype(np.int32)} if self.lengths else {})


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Any number of values: an object array of n arrays, or with `flat` one array of all values.

    `lengths` names an int32 array of the n lengths; `flat` requires it.
    """

    dtype: DType = "int64"
    flat: bool = False
    lengths: str | None = None

    def __post_init__(self) -> None:
        resolve_dtype(self.dtype)
        if self.flat and self.lengths is None:
            raise ValueError(
                "Ragged(flat=True) needs the lengths of the records; name them with lengths='...'"
            )

    @property
    def kind(self) -> int:
        """The kind of list that holds the values."""
        return kind_of(resolve_dtype(self.dtype))

    def outputs(self, name: str) -> list[str]:
        """Return the names of the arrays."""
        return [name, self.lengths] if self.lengths else [name]

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        """Return the arrays of a column; SpecError if a record does not fit."""
        values = convert(name, column, resolve_dtype(self.dtype), where)
        arrays = {name: values if self.flat else as_objects(split(values, column.counts))}
        return arrays | ({self.lengths: column.counts.astype(np.int32)} if self.lengths else {})


@dataclasses.dataclass(frozen=True)
class Raw:
    """One bytes value that holds an array's little-endian bytes: (n, *shape)."""

    shape: tuple[int, ...]
    dtype: DType = "uint8"
    kind = BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape))
        if resolve_dtype(self.dtype) == OBJECTS:
            raise TypeError(
                "Raw holds numbers, not bytes; Fixed((), 'bytes') gives the value as it is"
            )

    def outputs(self, name: str) -> list[str]:
        """Return the names of the arrays."""
        return [name]

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        """Return the arrays of a column; SpecError if a record does not fit."""
        _check_single(name, column, where, "Raw")
        dtype = resolve_dtype(self.dtype)
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
class Image:
    """One bytes value with a PNG or JPEG image of `shape` (height, width, channels): (n, *shape).

    The array is uint8. 1 channel is gray, 3 are RGB, 4 are RGBA. The orientation tag of a file is
    not applied. Needs Pillow.
    """

    shape: tuple[int, int, int]
    kind = BYTES

    def __post_init__(self) -> None:
        check_image_shape(self.shape)
        object.__setattr__(self, "shape", tuple(self.shape))

    def outputs(self, name: str) -> list[str]:
        """Return the names of the arrays."""
        return [name]

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
class Steps:
    """Any number of steps of one shape, padded at the end: (n, length, *shape).

    Without `length`, that of the longest record of the batch.

    `truncate` cuts longer records instead of raising. `lengths` names an int32 array of the
    original numbers of steps. The default of `step` fills in for a step without values.
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
        check_length(self.length, self.truncate)
        shape = checked_value("pad", self.filling, self.step.dtype).shape
        if shape not in ((), self.step.shape):
            raise ValueError(
                f"pad has shape {shape}, expected a single value or the shape of a step, "
                f"{self.step.shape}"
            )

    @property
    def filling(self) -> Any:
        """The pad in the kind of the values."""
        return default_pad(self.pad, self.step.dtype)

    def outputs(self, name: str) -> list[str]:
        """Return the names of the arrays."""
        return [name, self.lengths] if self.lengths else [name]

    def arrays(
        self, name: str, values: np.ndarray, counts: np.ndarray, where: Where
    ) -> dict[str, np.ndarray]:
        """Return the arrays from the values of all steps and the numbers of steps per record."""
        if self.length is not None and (long := counts > self.length).any():
            if not self.truncate:
                record = int(long.argmax())
                found = f"has {counts[record]} steps, expected at most {self.length}"
                raise SpecError(
                    f"{where(record)}: feature list {name} {found}; Steps(truncate=True) cuts them"
                )
            values, counts = cut(values, counts, self.length)
        arrays = {name: pad_rows(values, counts, self.length, self.filling)}
        return arrays | ({self.lengths: counts.astype(np.int32)} if self.lengths else {})


def check_kinds(name: str, column: Column, kind: int, where: Where) -> None:
    """Raise SpecError if a record has a different kind of list than the spec, even an empty one."""
    if np.count_nonzero(column.kinds == kind) == len(column.kinds):
        return
    wrong = (column.kinds != kind) & (column.kinds != ABSENT)
    if wrong.any():
        record = int(wrong.argmax())
        found = KIND_NAMES[int(column.kinds[record])]
        raise SpecError(
            f"{where(record)}: feature {name} has {found}, expected {KIND_NAMES[kind]}; "
            f"give the spec a dtype of {found}"
        )


def _check_single(name: str, column: Column, where: Where, entry: str) -> None:
    wrong = column.counts != 1
    if wrong.any():
        record = int(wrong.argmax())
        found = f"has {column.counts[record] or 'no'} values"
        raise SpecError(
            f"{where(record)}: feature {name} {found}, expected 1, the bytes of {entry}; "
            "see Ragged('bytes')"
        )
