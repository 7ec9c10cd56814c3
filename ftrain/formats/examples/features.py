"""Features: what a spec says of each feature, and how a column of values becomes the arrays that it asks for.

spec = {"image": Raw((28, 28), "uint8"), "label": Fixed((), "int32"), "words": Padded("int64", length=40)}
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

    `default` (one value, or all of the shape) is for records without the feature; without it they are an error.
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
        return kind_of(resolve_dtype(self.dtype))

    def outputs(self, name: str) -> list[str]:
        return [name]

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        dtype, size = resolve_dtype(self.dtype), math.prod(self.shape)
        wrong = column.counts != size
        missing = None
        if self.default is not None:
            missing = column.kinds == ABSENT  # an empty list is no missing one, as in the reference
            wrong &= ~missing
        if np.count_nonzero(wrong):
            raise self._miscounted(name, column, where, int(wrong.argmax()))
        values = convert(name, column, dtype, where)
        if missing is not None and np.count_nonzero(missing):
            filled = np.empty((len(missing), size), dtype)
            filled[missing] = self._filling().reshape(size)
            filled[~missing] = values.reshape(np.count_nonzero(~missing), size)
            values = filled
        return {name: values.reshape(len(wrong), *self.shape)}

    def _miscounted(self, name: str, column: Column, where: Where, record: int) -> SpecError:
        wanted = f"wanted {math.prod(self.shape)} (shape {self.shape})"
        if column.kinds[record] == ABSENT:
            return MissingFeatureError(where(record), name, wanted, record)
        found = f"has {column.counts[record]} value{'' if column.counts[record] == 1 else 's'}"
        return SpecError(
            f"{where(record)}: feature {name} {found}, {wanted}; Padded and Ragged take any number"
        )

    def _filling(self) -> np.ndarray:
        value = checked_value("default", self.default, self.dtype)
        try:
            return np.broadcast_to(value, self.shape)
        except ValueError:
            raise ValueError(
                f"default has shape {value.shape}, wanted one value or shape {self.shape}"
            ) from None


@dataclasses.dataclass(frozen=True)
class Padded:
    """Any number of values, padded at the end: (n, length), or as long as the longest of the batch.

    `truncate` cuts what is longer, which is an error otherwise. `lengths` names an int32 array of the true lengths.
    The pad of bytes is b"".
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
        return kind_of(resolve_dtype(self.dtype))

    @property
    def filling(self) -> Any:
        return default_pad(self.pad, self.dtype)

    def outputs(self, name: str) -> list[str]:
        return [name, self.lengths] if self.lengths else [name]

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        values = convert(name, column, resolve_dtype(self.dtype), where)
        counts = column.counts
        if self.length is not None and (long := counts > self.length).any():
            if not self.truncate:
                record = int(long.argmax())
                found = f"has {counts[record]} values, wanted at most {self.length}"
                raise SpecError(
                    f"{where(record)}: feature {name} {found}; Padded(truncate=True) cuts them"
                )
            values, counts = cut(values, counts, self.length)
        arrays = {name: pad_rows(values, counts, self.length, self.filling)}
        return arrays | ({self.lengths: counts.astype(np.int32)} if self.lengths else {})


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Any number of values: an object array of n arrays, or with `flat` all values in one array.

    `lengths` names an int32 array of the n lengths; with `flat` it must be given.
    """

    dtype: DType = "int64"
    flat: bool = False
    lengths: str | None = None

    def __post_init__(self) -> None:
        resolve_dtype(self.dtype)
        if self.flat and self.lengths is None:
            raise ValueError(
                "Ragged(flat=True) does not tell records apart; name an array for it with lengths='...'"
            )

    @property
    def kind(self) -> int:
        return kind_of(resolve_dtype(self.dtype))

    def outputs(self, name: str) -> list[str]:
        return [name, self.lengths] if self.lengths else [name]

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
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
        return [name]

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        _check_single(name, column, where, "Raw")
        dtype = resolve_dtype(self.dtype)
        wanted = math.prod(self.shape) * dtype.itemsize
        for record, value in enumerate(column.values):
            if len(value) != wanted:
                what = f"has {len(value)} bytes, wanted {wanted} (shape {self.shape} of {dtype})"
                raise SpecError(
                    f"{where(record)}: feature {name} {what}; give the shape and dtype it was written with"
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
    """One bytes value that holds a PNG or JPEG image of `shape` (height, width, channels): uint8 (n, *shape).

    1 channel is gray, 3 are RGB, 4 are RGBA. An orientation that the file asks for is not applied. Needs Pillow.
    """

    shape: tuple[int, int, int]
    kind = BYTES

    def __post_init__(self) -> None:
        check_image_shape(self.shape)
        object.__setattr__(self, "shape", tuple(self.shape))

    def outputs(self, name: str) -> list[str]:
        return [name]

    def arrays(self, name: str, column: Column, where: Where) -> dict[str, np.ndarray]:
        _check_single(name, column, where, "Image")
        images = np.empty((len(column.values), *self.shape), np.uint8)
        for record, value in enumerate(column.values):
            try:
                images[record] = decode_image(value, self.shape)
            except ValueError as error:
                raise SpecError(f"{where(record)}: feature {name} {error}") from None
        return {name: images}


Entry = Fixed | Padded | Ragged | Raw | Image


def check_kinds(name: str, column: Column, kind: int, where: Where) -> None:
    """SpecError if a record has another kind of list than the spec wants, even an empty one."""
    if np.count_nonzero(column.kinds == kind) == len(column.kinds):
        return
    wrong = (column.kinds != kind) & (column.kinds != ABSENT)
    if wrong.any():
        record = int(wrong.argmax())
        found = KIND_NAMES[int(column.kinds[record])]
        way = f"give the spec a dtype of {found}"
        raise SpecError(
            f"{where(record)}: feature {name} has {found}, wanted {KIND_NAMES[kind]}; {way}"
        )


def _check_single(name: str, column: Column, where: Where, entry: str) -> None:
    wrong = column.counts != 1
    if wrong.any():
        record = int(wrong.argmax())
        found = f"has {column.counts[record] or 'no'} values"
        raise SpecError(
            f"{where(record)}: feature {name} {found}, wanted 1, the bytes of {entry}; see Ragged('bytes')"
        )
