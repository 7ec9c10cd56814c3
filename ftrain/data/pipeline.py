"""The pipeline: batch = f(seed, step), whoever asks, in whatever order."""

import functools
from typing import Any

import numpy as np

from ftrain.data.source import Source

Batch = dict[str, np.ndarray]


class Pipeline:
    """Batches of a source, each a pure function of the seed and the step.

    Every epoch is a permutation of its own, and epochs follow each other without a gap: no example is dropped, every
    batch is full. Process `shard_index` of `shard_count` gets its slice of the same global batch, so what a step
    trains on does not depend on how many processes load it.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        shard_index: int = 0,
        shard_count: int = 1,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        if batch_size > len(source):
            raise ValueError(f"batch_size {batch_size} is larger than the data, which has {len(source)} examples")
        if batch_size % shard_count:
            raise ValueError(f"batch_size {batch_size} does not divide over {shard_count} processes")
        if not 0 <= shard_index < shard_count:
            raise ValueError(f"shard_index must be in [0, {shard_count}), got {shard_index}")
        self.source, self.batch_size, self.seed, self.shuffle = source, batch_size, seed, shuffle
        self.shard_index, self.shard_count = shard_index, shard_count
        # A batch can reach from one epoch into the next, so two permutations are alive at a time.
        self._permutation = functools.lru_cache(maxsize=2)(self._make_permutation)

    def batch(self, step: int) -> Batch:
        """This process's part of the batch that step number `step`, counted from 0, trains on."""
        return self.source.read(self.indices(step))

    def indices(self, step: int, count: int = 1) -> np.ndarray:
        """The examples of this process's part of `count` batches from `step` on, by their index in the source."""
        share = self.batch_size // self.shard_count
        starts = np.arange(step, step + count) * self.batch_size + self.shard_index * share
        positions = (starts[:, None] + np.arange(share)).ravel()
        epochs, offsets = np.divmod(positions, len(self.source))
        if not self.shuffle:
            return offsets
        for epoch in range(epochs[0], epochs[-1] + 1):  # one or two, unless the source is tiny
            inside = slice(*np.searchsorted(epochs, [epoch, epoch + 1]))
            offsets[inside] = self._permutation(epoch)[offsets[inside]]
        return offsets

    def identity(self, step: int) -> dict[str, Any]:
        """What the batch of a step is made of, as JSON can say it."""
        return {
            "seed": self.seed,
            "step": step,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "indices": self.indices(step).tolist(),
        }

    def batches(self, step: int, count: int) -> Batch:
        """This process's part of `count` batches from `step` on, stacked along a new first axis, in one read."""
        arrays = self.source.read(self.indices(step, count))
        return {name: array.reshape(count, -1, *array.shape[1:]) for name, array in arrays.items()}

    def _make_permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.source))
