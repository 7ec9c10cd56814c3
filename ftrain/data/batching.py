"""Batching: which examples make the batch of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from ftrain.data.order import Ordering
from ftrain.data.permutation import permute
from ftrain.data.source import Source

Last = Literal["drop", "keep"]


class Batching(Protocol):
    """Batches by step, of all processes together."""

    steps: int | None  # after which the data end
    is_uniform: bool  # all batches have the same size and are padded alike

    def sizes(self, step: int, count: int) -> list[int]: ...

    def indices(self, step: int, count: int) -> np.ndarray:
        """The examples of `count` batches from `step` on, one behind the other."""
        ...

    def length(self, step: int) -> int | None:
        """What features without a length of their own are padded to."""
        ...

    def is_whole(self, count: int) -> bool:
        """Whether every batch divides by `count`, if a full one does."""
        ...


class Consecutive:
    """Batches of one size cut from the stream of epochs, without a gap between two of them."""

    def __init__(
        self, source: Source, size: int, seed: int, shuffle: bool, epochs: int | None, last: Last
    ):
        self._size = size
        self._total = None if epochs is None else epochs * len(source)
        self._ordering = Ordering(source, seed, shuffle, size)
        self.steps = None if self._total is None else _count(self._total, size, last)
        self.is_uniform = self.steps is None or self._total == self.steps * size or last == "drop"

    def sizes(self, step: int, count: int) -> list[int]:
        if self.is_uniform or self._total is None:
            return [self._size] * count
        return [min(self._size, self._total - at * self._size) for at in range(step, step + count)]

    def indices(self, step: int, count: int) -> np.ndarray:
        stop = (step + count) * self._size
        return self._ordering.indices(
            step * self._size, stop if self._total is None else min(stop, self._total)
        )

    def length(self, step: int) -> int | None:
        return None

    def is_whole(self, count: int) -> bool:
        return self.is_uniform or (self._total or 0) % self._size % count == 0


@dataclass(frozen=True)
class Buckets:
    """Batches of examples of similar length: each is taken from one bucket, and padded to its boundary.

    Args:
      lengths: of every example of the source; `example_lengths` measures them.
      boundaries: the greatest length that each bucket holds, increasing.
      batch_sizes: one for each bucket, instead of the pipeline's, which then counts for nothing.
      longer: whether examples longer than the last boundary are an error or left out.
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
                f"there are {len(bounds)} buckets, but {len(self.batch_sizes)} batch_sizes"
            )
        if self.batch_sizes is not None and min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be >= 1, got {list(self.batch_sizes)}")
        if self.longer not in ("raise", "drop"):
            raise ValueError(f"longer must be 'raise' or 'drop', got {self.longer!r}")
        beyond = np.flatnonzero(np.asarray(self.lengths) > bounds[-1])
        if len(beyond) and self.longer == "raise":
            raise ValueError(
                f"{len(beyond)} examples are longer than the last boundary, {bounds[-1]}, the first of them example "
                f"{beyond[0]} with {self.lengths[beyond[0]]}; add a boundary, or leave them out with longer='drop'"
            )

    def members(self) -> list[np.ndarray]:
        """The examples of each bucket."""
        chosen = np.searchsorted(np.asarray(self.boundaries), np.asarray(self.lengths), "left")
        return [np.flatnonzero(chosen == number) for number in range(len(self.boundaries))]


class Bucketed:
    """Batches of buckets. Each bucket is a stream of epochs of its own, cut into batches without a gap.

    In an epoch come those batches that are full by its end, in an order of the epoch's own. What is left over begins
    the bucket's next batch, in a later epoch: a bucket with fewer examples than a batch has one every few epochs.
    """

    is_uniform = False

    def __init__(
        self, buckets: Buckets, size: int, seed: int, shuffle: bool, epochs: int | None, last: Last
    ):
        self._members, self._bounds = buckets.members(), list(buckets.boundaries)
        self._sizes = (
            [size] * len(self._bounds) if buckets.batch_sizes is None else list(buckets.batch_sizes)
        )
        self._counts = [len(members) for members in self._members]
        if not any(self._counts):
            raise ValueError(f"no example is in a bucket; boundaries are {self._bounds}")
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._orders = [
            Ordering(_Count(count), _bucket_seed(seed, bucket), shuffle, size)
            for bucket, (count, size) in enumerate(zip(self._counts, self._sizes, strict=True))
        ]
        left_over = [bucket for bucket in range(len(self._bounds)) if self._left_over(bucket)]
        self._kept = left_over if last == "keep" else []
        self.steps = None if epochs is None else self._before(epochs) + len(self._kept)

    def sizes(self, step: int, count: int) -> list[int]:
        return [stop - start for _, start, stop in map(self._place, range(step, step + count))]

    def indices(self, step: int, count: int) -> np.ndarray:
        return np.concatenate([self._batch(at) for at in range(step, step + count)])

    def length(self, step: int) -> int | None:
        return self._bounds[self._place(step)[0]]

    def is_whole(self, count: int) -> bool:
        return all(self._left_over(bucket) % count == 0 for bucket in self._kept)

    def _batch(self, step: int) -> np.ndarray:
        bucket, start, stop = self._place(step)
        return self._members[bucket][self._orders[bucket].indices(start, stop)]

    def _place(self, step: int) -> tuple[int, int, int]:
        """The bucket that a step's batch is taken from, and where in the bucket's stream."""
        if self.steps is not None and step >= self.steps - len(
            self._kept
        ):  # the last ones, which are not full
            bucket = self._kept[step - self.steps + len(self._kept)]
            stop = self._counts[bucket] * (self._epochs or 0)
            return bucket, stop - self._left_over(bucket), stop
        epoch = self._epoch(step)
        firsts = self._batches(epoch)
        ends = np.cumsum(
            [after - first for first, after in zip(firsts, self._batches(epoch + 1), strict=True)]
        )
        number = step - self._before(epoch)
        if self._shuffle:
            number = int(permute(np.array([number]), int(ends[-1]), (self._seed, epoch))[0])
        bucket = int(np.searchsorted(ends, number, "right"))
        first = firsts[bucket] + number - (int(ends[bucket - 1]) if bucket else 0)
        return bucket, first * self._sizes[bucket], (first + 1) * self._sizes[bucket]

    def _epoch(self, step: int) -> int:
        """The epoch of a step: the last one with no more than so many batches before it."""
        low, high = 0, 1
        while self._before(high) <= step:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._before(middle) <= step else (low, middle)
        return low

    def _before(self, epoch: int) -> int:
        """The number of batches before an epoch."""
        return sum(self._batches(epoch))

    def _batches(self, epoch: int) -> list[int]:
        """How many each bucket has filled before an epoch."""
        return [
            epoch * count // size for count, size in zip(self._counts, self._sizes, strict=True)
        ]

    def _left_over(self, bucket: int) -> int:
        return (self._epochs or 0) * self._counts[bucket] % self._sizes[bucket]


class _Count:
    """A length, for an order of numbers."""

    def __init__(self, length: int):
        self._length = max(length, 1)

    def __len__(self) -> int:
        return self._length


def _bucket_seed(seed: int, bucket: int) -> int:
    return int(np.random.SeedSequence((seed, bucket)).generate_state(1)[0])


def _count(examples: int, size: int, last: Last) -> int:
    return -(-examples // size) if last == "keep" else examples // size


def example_lengths(source: Source, feature: str, *, chunk: int = 1024) -> np.ndarray:
    """The length of a feature in every example of a source, all of which are read once."""
    lengths = np.empty(len(source), np.int64)
    for at in range(0, len(source), chunk):
        rows = source.read(np.arange(at, min(at + chunk, len(source))))
        if feature not in rows:
            raise ValueError(
                f"there is no feature {feature} to measure; there are {', '.join(rows)}"
            )
        if np.ndim(rows[feature]) == 1 and not rows[feature].dtype.hasobject:
            raise ValueError(
                f"feature {feature} has no length: it holds single values, such as {rows[feature][0]!r}"
            )
        lengths[at : at + chunk] = [len(row) for row in rows[feature]]
    return lengths
