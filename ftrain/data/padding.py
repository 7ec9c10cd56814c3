"""Padding: features of unequal lengths as arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ftrain.data.source import Batch


@dataclass(frozen=True)
class Pad:
    """Pad a feature with `value` at its end, to one length.

    Args:
      length: None for the boundary of the bucket or, without buckets, for the longest of the batch,
        rounded up to a multiple of `multiple`.
      truncate: cut longer examples instead of raising.
      lengths: name of an int32 feature with the original lengths.
    """

    length: int | None = None
    value: Any = 0
    truncate: bool = False
    lengths: str = ""
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ValueError(f"length must be >= 1, got {self.length}")
        if self.multiple < 1:
            raise ValueError(f"multiple must be >= 1, got {self.multiple}")


def check_pads(pads: Mapping[str, Pad]) -> None:
    """Raise unless all values are Pads whose `lengths` collide with no padded feature."""
    for name, pad in pads.items():
        if not isinstance(pad, Pad):
            raise TypeError(f"pad={{{name!r}: {pad!r}}} is not a Pad; write Pad({pad!r})")
        if pad.lengths in pads:
            raise ValueError(f"the lengths of {name} would replace the feature {pad.lengths}")


def pad_batch(
    batch: Batch,
    pads: Mapping[str, Pad],
    bucket: int | None = None,
    where: Callable[[int], str] | None = None,
) -> Batch:
    """Return the batch with the features of `pads` padded.

    `bucket` is the length for Pads without one. `where` names a row of the batch in messages.
    """
    padded = dict(batch)
    for name, pad in pads.items():
        if name not in batch:
            raise ValueError(f"no feature {name} to pad; the features are {', '.join(batch)}")
        if pad.lengths in batch:
            raise ValueError(f"the lengths of {name} would replace the feature {pad.lengths}")
        padded |= _pad_feature(name, batch[name], pad, bucket, where or (lambda row: f"row {row}"))
    return padded


def _pad_feature(
    name: str, column: np.ndarray, pad: Pad, bucket: int | None, where: Callable[[int], str]
) -> Batch:
    rows = [np.asarray(row) for row in column]
    scalars = [row for row in rows if row.ndim == 0]
    if scalars:
        raise ValueError(
            f"feature {name} has no length to pad: it holds single values, such as {scalars[0]!r}"
        )
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = int(lengths.max(initial=1))
    length = pad.length or bucket or -(-longest // pad.multiple) * pad.multiple
    if longest > length and not pad.truncate:
        place = where(int(lengths.argmax()))
        raise ValueError(
            f"{place}: {name} has {longest} values, expected at most {length}; "
            "Pad(truncate=True) cuts it"
        )
    # The shape of an empty row counts only if all rows are empty.
    shapes = {row.shape[1:] for row in rows if len(row)}
    if not shapes:
        shapes = {max((row.shape[1:] for row in rows), key=len)}
    if len(shapes) > 1:
        raise ValueError(
            f"feature {name} has values of several shapes, {', '.join(map(str, sorted(shapes)))}"
        )
    dtype = np.result_type(*(row for row in rows if len(row))) if lengths.any() else rows[0].dtype
    whole = np.empty((len(rows), length, *shapes.pop()), dtype)
    whole.fill(_check_value(name, pad.value, dtype))  # np.full would drop trailing zero bytes
    for at, row in enumerate(rows):
        if len(row):
            whole[at, : len(row)] = row[:length]
    return {name: whole} | ({pad.lengths: np.minimum(lengths, length)} if pad.lengths else {})


def _check_value(name: str, value: Any, dtype: np.dtype) -> Any:
    """Return the padding value if the dtype can hold it."""
    if dtype.kind in "iu" and (
        not np.isfinite(value) or value != np.floor(value) or not _fits(value, dtype)
    ):
        raise ValueError(f"{name} holds {dtype}, which cannot be padded with {value!r}")
    return value


def _fits(value: Any, dtype: np.dtype) -> bool:
    return np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
