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

    def __init__(self, source: Source, size: int, seed: int, shuffle: bool, epochs: int | None, last: Last):
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
        return self._ordering.indices(step * self._size, stop if self._total is None else min(stop, self._total))

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
            raise ValueError(f"there are {len(bounds)} buckets, but {len(self.batch_sizes)} batch_sizes")
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
    """Batches of buckets. In each epoch each bucket is a permutation of its own, and so are the batches of all."""

    is_uniform = False

    def __init__(self, buckets: Buckets, size: int, seed: int, shuffle: bool, epochs: int | None, last: Last):
        self._members, self._bounds = buckets.members(), list(buckets.boundaries)
        self._sizes = [size] * len(self._bounds) if buckets.batch_sizes is None else list(buckets.batch_sizes)
        self._seed, self._shuffle, self._last = seed, shuffle, last
        pairs = zip(self._members, self._sizes, strict=True)
        self._ends = np.cumsum([_count(len(members), size, last) for members, size in pairs])
        if not self._ends[-1]:
            raise ValueError(f"no bucket has a full batch: they have {[len(m) for m in self._members]} examples")
        self.steps = None if epochs is None else epochs * int(self._ends[-1])

    def sizes(self, step: int, count: int) -> list[int]:
        places = (self._place(at) for at in range(step, step + count))
        return [stop - start for _, _, start, stop in places]

    def indices(self, step: int, count: int) -> np.ndarray:
        return np.concatenate([self._batch(at) for at in range(step, step + count)])

    def length(self, step: int) -> int | None:
        return self._bounds[self._place(step)[1]]

    def is_whole(self, count: int) -> bool:
        pairs = zip(self._members, self._sizes, strict=True)
        return self._last == "drop" or all(len(members) % size % count == 0 for members, size in pairs)

    def _place(self, step: int) -> tuple[int, int, int, int]:
        """The epoch of a step, the bucket that its batch is taken from, and which of its examples."""
        epoch, number = divmod(step, int(self._ends[-1]))
        if self._shuffle:
            number = int(permute(np.array([number]), int(self._ends[-1]), (self._seed, epoch))[0])
        bucket = int(np.searchsorted(self._ends, number, "right"))
        start = (number - (int(self._ends[bucket - 1]) if bucket else 0)) * self._sizes[bucket]
        return epoch, bucket, start, min(start + self._sizes[bucket], len(self._members[bucket]))

    def _batch(self, step: int) -> np.ndarray:
        epoch, bucket, start, stop = self._place(step)
        places = np.arange(start, stop)
        if self._shuffle:
            places = permute(places, len(self._members[bucket]), (self._seed, epoch, bucket + 1))
        return self._members[bucket][places]


def _count(examples: int, size: int, last: Last) -> int:
    return -(-examples // size) if last == "keep" else examples // size


def example_lengths(source: Source, feature: str, *, chunk: int = 1024) -> np.ndarray:
    """The length of a feature in every example of a source, all of which are read once."""
    lengths = np.empty(len(source), np.int64)
    for at in range(0, len(source), chunk):
        rows = source.read(np.arange(at, min(at + chunk, len(source))))
        if feature not in rows:
            raise ValueError(f"there is no feature {feature} to measure; there are {', '.join(rows)}")
        lengths[at : at + chunk] = [len(row) for row in rows[feature]]
    return lengths
