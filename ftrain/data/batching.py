"""Batching: which examples form the batch of a step, and how their features are padded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ftrain.data.order import Ordering, permute
from ftrain.data.source import Batch, Source

Last = Literal["drop", "keep", "pad"]


class Batching(Protocol):
    """The global batches by step, before they are divided among processes."""

    steps: int | None  # the number of batches; None if they never end
    is_uniform: bool  # all batches have the same size and padding
    dropped: int  # the number of examples at the end that fill no batch and are in none

    def full_size(self, step: int) -> int:
        """Return the size of a step's batch if it is full."""
        ...

    def sizes(self, step: int, count: int) -> list[int]:
        """Return the sizes of `count` batches from `step` on."""
        ...

    def indices(self, step: int, count: int) -> np.ndarray:
        """Return the examples of `count` batches from `step` on, concatenated."""
        ...

    def count(self, epochs: float) -> int:
        """Return the number of batches in `epochs` epochs."""
        ...

    def length(self, step: int) -> int | None:
        """Return the padded length of features whose Pad has none; None for the longest."""
        ...

    def is_whole(self, count: int) -> bool:
        """Return True if every batch divides by `count`, provided that a full one does."""
        ...


class Consecutive:
    """Batches of one size, cut from the stream of epochs without gaps."""

    def __init__(
        self, source: Source, size: int, seed: int, shuffle: bool, epochs: int | None, last: Last
    ):
        self._size = size
        self._examples = len(source)
        self._last: Last = last
        self._total = None if epochs is None else epochs * len(source)
        self._ordering = Ordering(source, seed, shuffle, size)
        self.steps = None if self._total is None else _count_batches(self._total, size, last)
        self.is_uniform = self.steps is None or self._total == self.steps * size or last == "drop"
        self.dropped = 0 if self._total is None or last != "drop" else self._total % size

    def full_size(self, step: int) -> int:
        """Return the size of a full batch."""
        return self._size

    def sizes(self, step: int, count: int) -> list[int]:
        """Return the sizes of `count` batches from `step` on."""
        if self.is_uniform or self._total is None:
            return [self._size] * count
        return [min(self._size, self._total - at * self._size) for at in range(step, step + count)]

    def indices(self, step: int, count: int) -> np.ndarray:
        """Return the examples of `count` batches from `step` on, concatenated."""
        stop = (step + count) * self._size
        return self._ordering.indices(
            step * self._size, stop if self._total is None else min(stop, self._total)
        )

    def count(self, epochs: float) -> int:
        """Return the number of batches in `epochs` epochs."""
        return _count_batches(int(epochs * self._examples), self._size, self._last)

    def length(self, step: int) -> int | None:
        """Return None: features are padded to the longest of the batch."""
        return None

    def is_whole(self, count: int) -> bool:
        """Return True if the last batch divides by `count`, provided that a full one does."""
        return self.is_uniform or (self._total or 0) % self._size % count == 0


@dataclass(frozen=True)
class Buckets:
    """Batches of examples of similar length: each comes from one bucket, padded to its boundary.

    Args:
      lengths: the length of every example of the source; `example_lengths` measures them.
      boundaries: the maximum length of each bucket, increasing.
      batch_sizes: one batch size per bucket; they replace the batch size of the pipeline.
      longer: "raise" or "drop" examples longer than the last boundary.
    """

    lengths: np.ndarray
    boundaries: Sequence[int]
    batch_sizes: Sequence[int] | None = None
    longer: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        bounds = list(self.boundaries)
        if not bounds or bounds != sorted(set(bounds)) or bounds[0] < 1:
            raise ValueError(f"boundaries must be increasing and >= 1, got {bounds}")
        if self.batch_sizes is not None and len(self.batch_sizes) != len(bounds):
            raise ValueError(
                f"batch_sizes must have an entry for each of the {len(bounds)} buckets, "
                f"got {len(self.batch_sizes)}"
            )
        if self.batch_sizes is not None and min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be >= 1, got {list(self.batch_sizes)}")
        if self.longer not in ("raise", "drop"):
            raise ValueError(f"longer must be 'raise' or 'drop', got {self.longer!r}")
        beyond = np.flatnonzero(np.asarray(self.lengths) > bounds[-1])
        if len(beyond) and self.longer == "raise":
            raise ValueError(
                f"{len(beyond)} examples are longer than the last boundary, {bounds[-1]}: "
                f"the first is example {beyond[0]} with length {self.lengths[beyond[0]]}; "
                "add a boundary, or pass longer='drop'"
            )

    def members(self) -> list[np.ndarray]:
        """Return the examples of each bucket."""
        chosen = np.searchsorted(np.asarray(self.boundaries), np.asarray(self.lengths), "left")
        return [np.flatnonzero(chosen == number) for number in range(len(self.boundaries))]


class Bucketed:
    """Batches of buckets. Each bucket is its own stream of epochs, cut into batches without gaps.

    An epoch has the batches that are full by its end, in its own shuffled order. The remaining
    examples start the bucket's next batch, in a later epoch: a bucket with fewer examples than a
    batch fills one every few epochs.
    """

    is_uniform = False

    def __init__(
        self, buckets: Buckets, size: int, seed: int, shuffle: bool, epochs: int | None, last: Last
    ):
        self._members = buckets.members()
        self._bounds = list(buckets.boundaries)
        self._sizes = (
            [size] * len(self._bounds) if buckets.batch_sizes is None else list(buckets.batch_sizes)
        )
        self._counts = [len(members) for members in self._members]
        if not any(self._counts):
            raise ValueError(f"no example fits into a bucket; boundaries are {self._bounds}")
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._orders = [
            Ordering(range(max(count, 1)), _bucket_seed(seed, bucket), shuffle, size)
            for bucket, (count, size) in enumerate(zip(self._counts, self._sizes, strict=True))
        ]
        unfilled = [bucket for bucket in range(len(self._bounds)) if self._remainder(bucket)]
        self._last: Last = last
        self._unfilled = unfilled if last == "keep" else []
        self.steps = None if epochs is None else self._batches_before(epochs) + len(self._unfilled)
        self.dropped = 0 if last == "keep" else sum(map(self._remainder, range(len(self._bounds))))

    def full_size(self, step: int) -> int:
        """Return the batch size of the step's bucket."""
        return self._sizes[self._place(step)[0]]

    def sizes(self, step: int, count: int) -> list[int]:
        """Return the sizes of `count` batches from `step` on."""
        return [stop - start for _, start, stop in map(self._place, range(step, step + count))]

    def indices(self, step: int, count: int) -> np.ndarray:
        """Return the examples of `count` batches from `step` on, concatenated."""
        return np.concatenate([self._batch(at) for at in range(step, step + count)])

    def count(self, epochs: float) -> int:
        """Return the number of batches in `epochs` epochs, summed over the buckets."""
        return sum(
            _count_batches(int(epochs * count), size, self._last)
            for count, size in zip(self._counts, self._sizes, strict=True)
        )

    def length(self, step: int) -> int | None:
        """Return the boundary of the step's bucket."""
        return self._bounds[self._place(step)[0]]

    def is_whole(self, count: int) -> bool:
        """Return True if the size of every incomplete last batch is a multiple of `count`."""
        return all(self._remainder(bucket) % count == 0 for bucket in self._unfilled)

    def _batch(self, step: int) -> np.ndarray:
        bucket, start, stop = self._place(step)
        return self._members[bucket][self._orders[bucket].indices(start, stop)]

    def _place(self, step: int) -> tuple[int, int, int]:
        """Return the bucket of a step's batch, and its start and stop in the bucket's stream."""
        full = None if self.steps is None else self.steps - len(self._unfilled)
        if full is not None and step >= full:
            bucket = self._unfilled[step - full]
            stop = self._counts[bucket] * (self._epochs or 0)
            return bucket, stop - self._remainder(bucket), stop
        epoch = self._epoch(step)
        firsts = self._batches_by_bucket(epoch)
        ends = np.cumsum(
            [
                after - first
                for first, after in zip(firsts, self._batches_by_bucket(epoch + 1), strict=True)
            ]
        )
        number = step - self._batches_before(epoch)
        if self._shuffle:
            number = int(permute(np.array([number]), int(ends[-1]), (self._seed, epoch))[0])
        bucket = int(np.searchsorted(ends, number, "right"))
        first = firsts[bucket] + number - (int(ends[bucket - 1]) if bucket else 0)
        return bucket, first * self._sizes[bucket], (first + 1) * self._sizes[bucket]

    def _epoch(self, step: int) -> int:
        """Return the epoch of a step: the last one with at most `step` batches before it."""
        low = 0
        high = 1
        while self._batches_before(high) <= step:
            low = high
            high = 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self._batches_before(middle) <= step:
                low = middle
            else:
                high = middle
        return low

    def _batches_before(self, epoch: int) -> int:
        """Return the number of batches before an epoch."""
        return sum(self._batches_by_bucket(epoch))

    def _batches_by_bucket(self, epoch: int) -> list[int]:
        """Return how many batches each bucket has filled before an epoch."""
        return [
            epoch * count // size for count, size in zip(self._counts, self._sizes, strict=True)
        ]

    def _remainder(self, bucket: int) -> int:
        return (self._epochs or 0) * self._counts[bucket] % self._sizes[bucket]


def _bucket_seed(seed: int, bucket: int) -> int:
    return int(np.random.SeedSequence((seed, bucket)).generate_state(1)[0])


def _count_batches(examples: int, size: int, last: Last) -> int:
    return -(-examples // size) if last == "keep" else examples // size


def example_lengths(source: Source, feature: str, *, chunk: int = 1024) -> np.ndarray:
    """Return the length of a feature in every example of a source, reading all of them once."""
    lengths = np.empty(len(source), np.int64)
    for at in range(0, len(source), chunk):
        rows = source.read(np.arange(at, min(at + chunk, len(source))))
        if feature not in rows:
            raise ValueError(f"no feature {feature} to measure; the features are {', '.join(rows)}")
        if np.ndim(rows[feature]) == 1 and not rows[feature].dtype.hasobject:
            raise ValueError(
                f"feature {feature} has no length: it holds single values, "
                f"such as {rows[feature][0]!r}"
            )
        lengths[at : at + chunk] = [len(row) for row in rows[feature]]
    return lengths


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
            raise ValueError(
                f"the lengths of {name} would replace the feature {pad.lengths}; "
                "choose another name: Pad(lengths=...)"
            )


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
        found = ", ".join(map(str, sorted(shapes)))
        raise ValueError(f"feature {name} must have values of one shape, got {found}")
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
