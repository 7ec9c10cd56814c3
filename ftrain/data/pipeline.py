"""The pipeline: batch = f(seed, step), whoever asks, in whatever order."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import numpy as np

from ftrain.coordination import EndOfData
from ftrain.data.batching import Batching, Bucketed, Buckets, Consecutive, Last
from ftrain.data.changing import Example, call, join, name_of, split
from ftrain.data.combining import check_plain
from ftrain.data.padding import Pad, check_pads, pad_batch
from ftrain.data.source import Batch, Source, check_batch, describe, settle, where

Transform = Callable[[Example, np.random.Generator], Example]


class Pipeline:
    """Batches of a source, each a pure function of the seed and the step.

    Every epoch is a permutation of its own, and epochs follow each other without a gap: no example is dropped, every
    batch is full. Process `shard_index` of `shard_count` gets its slice of the same global batch, so what a step
    trains on does not depend on how many processes load it; nor on how many threads or worker processes do.

    Args:
      epochs: after which the data end; None for never.
      last: whether a last batch that is not full is dropped or kept.
      buckets: batches of examples of similar length, instead of consecutive ones.
      pad: features of unequal lengths, and how each is padded.
      transform: what is made of each example, given it and a generator of random numbers that is its own at this step.
      threads: that read and decode ahead, each a batch or several small ones; they call the source at the same time.
      workers: processes that do so, for transforms that are heavy work in Python; the source and all functions are sent
        to them, so these must be importable.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        last: Last = "drop",
        buckets: Buckets | None = None,
        pad: Mapping[str, Pad] | None = None,
        transform: Transform | None = None,
        threads: int = 1,
        workers: int = 0,
        shard_index: int = 0,
        shard_count: int = 1,
    ):
        _check_at_least(1, batch_size=batch_size, epochs=epochs, threads=threads)
        _check_at_least(0, seed=seed, workers=workers)
        if last not in get_args(Last):
            raise ValueError(f"last must be 'drop' or 'keep', got {last!r}")
        if not (hasattr(source, "__len__") and hasattr(source, "read")):
            hint = "; use ArraySource(arrays)" if isinstance(source, Mapping) else ""
            raise TypeError(
                f"a source has a length and read(indices), {type(source).__name__} has not{hint}"
            )
        check_pads(pad or {})
        if not len(source):
            raise ValueError(f"{describe(source)} has no examples")
        batch_size, seed, shuffle = operator.index(batch_size), operator.index(seed), bool(shuffle)
        epochs = None if epochs is None else operator.index(epochs)
        self.source, self.batch_size, self.seed, self.shuffle, self.epochs = (
            source,
            batch_size,
            seed,
            shuffle,
            epochs,
        )
        self.pad, self.transform, self.threads, self.workers = (
            dict(pad or {}),
            transform,
            threads,
            workers,
        )
        self.shard_index, self.shard_count = shard_index, shard_count
        self._batching = _batching(source, batch_size, seed, shuffle, epochs, last, buckets)
        self.steps = self._batching.steps  # the number of batches, if they end
        if self.steps == 0:
            raise ValueError(
                f"{epochs} epochs of {describe(source)} fill no batch; use a smaller one, or last='keep'"
            )
        self._check_shards(buckets)
        has_lengths = all(pad.length is not None for pad in self.pad.values())
        self.is_uniform: bool = self._batching.is_uniform and has_lengths
        self.has_several_shapes = not self._batching.is_uniform  # as was asked for

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the first step on; `feed` has a thread read ahead, and begins at any step."""
        return map(self.batch, itertools.count() if self.steps is None else range(self.steps))

    def batch(self, step: int) -> Batch:
        """This process's part of the batch that step number `step`, counted from 0, trains on."""
        return self._finished(self._read(step, 1), step)

    def batches(self, step: int, count: int) -> Batch:
        """This process's part of `count` batches from `step` on, stacked along a new first axis, in one read."""
        if self.is_uniform and not self.pad:
            arrays = self._read(step, count)
            if not any(array.dtype.hasobject for array in arrays.values()):
                return {
                    name: array.reshape(count, -1, *array.shape[1:])
                    for name, array in arrays.items()
                }
            several = self._cut(arrays, step, count)
        else:
            several = self.split(step, count)
        return {name: np.stack([batch[name] for batch in several]) for name in several[0]}

    def split(self, step: int, count: int) -> list[Batch]:
        """As `batches`, each for itself: those of buckets have unequal shapes."""
        return self._cut(self._read(step, count), step, count)

    def _cut(self, arrays: Batch, step: int, count: int) -> list[Batch]:
        sizes = [size // self.shard_count for size in self._batching.sizes(step, count)]
        bounds = enumerate(itertools.pairwise(itertools.accumulate(sizes, initial=0)), step)
        return [
            self._finished({name: array[start:end] for name, array in arrays.items()}, at)
            for at, (start, end) in bounds
        ]

    def indices(self, step: int, count: int = 1) -> np.ndarray:
        """The examples of this process's part of `count` batches from `step` on, by their index in the source."""
        if type(step) is not int:
            step = operator.index(step)  # numpy's would overflow
        if step < 0 or count < 1:
            raise ValueError(
                f"there is no step {step}" if step < 0 else f"count must be >= 1, got {count}"
            )
        if self.steps is not None and step + count > self.steps:
            raise EndOfData(
                f"the data end after {self.steps} batches; batch {step + count} was asked for"
            )
        whole = self._batching.indices(step, count)
        if self.shard_count == 1:
            return whole
        starts = np.cumsum([0, *self._batching.sizes(step, count)]).tolist()
        return np.concatenate(
            [self._share(whole[start:end]) for start, end in itertools.pairwise(starts)]
        )

    def summary(self) -> dict[str, Any]:
        """What all batches depend on, beside the contents of the source, as JSON can say it."""
        return {
            "examples": len(self.source),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
        }

    def identity(self, step: int) -> dict[str, Any]:
        """What the batch of a step is made of, as JSON can say it."""
        of_step = {
            "source": describe(self.source),
            "step": step,
            "indices": self.indices(step).tolist(),
        }
        return self.summary() | of_step

    def _finished(self, batch: Batch, step: int) -> Batch:
        for array in batch.values():
            if array.dtype.hasobject:
                batch = {name: settle(array) for name, array in batch.items()}
                break
        if not self.pad:
            return batch
        return pad_batch(
            batch,
            self.pad,
            self._batching.length(step),
            where=lambda row: where(self.source, int(self.indices(step)[row])),
        )

    def _share(self, indices: np.ndarray) -> np.ndarray:
        share = len(indices) // self.shard_count
        return indices[self.shard_index * share : (self.shard_index + 1) * share]

    def _read(self, step: int, count: int) -> Batch:
        indices = self.indices(step, count)
        try:
            batch = self.source.read(indices)
            if not _is_batch(batch, len(indices)):
                batch = check_batch(batch, len(indices), describe(self.source))
            return (
                batch if self.transform is None else self._transformed(batch, indices, step, count)
            )
        except StopIteration as error:  # it would be lost in a generator
            raise EndOfData(f"{describe(self.source)} has no more examples") from error
        except Exception as error:
            steps = (
                f"step {step + 1}" if count == 1 else f"the steps from {step + 1} to {step + count}"
            )
            error.add_note(f"while the input of {steps} was read from {describe(self.source)}")
            raise

    def _transformed(self, batch: Batch, indices: np.ndarray, step: int, count: int) -> Batch:
        assert self.transform is not None
        made = [
            call(
                self.transform,
                example,
                rng,
                place=functools.partial(where, self.source, int(index)),
            )
            for example, index, rng in zip(
                split(batch), indices, self._generators(step, count), strict=True
            )
        ]
        return join(made, name_of(self.transform))

    def _generators(self, step: int, count: int) -> Iterator[np.random.Generator]:
        """Random numbers for each example, by its step and its row in the batch of all processes together."""
        for at, size in enumerate(self._batching.sizes(step, count), step):
            for row in self._share(np.arange(size)).tolist():
                yield np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, row, at]))

    def _check_shards(self, buckets: Buckets | None) -> None:
        count = self.shard_count
        if not 0 <= self.shard_index < count:
            raise ValueError(f"shard_index must be in [0, {count}), got {self.shard_index}")
        sizes = None if buckets is None else buckets.batch_sizes
        for size in (self.batch_size,) if sizes is None else sizes:
            if size % count:
                raise ValueError(f"batch_size {size} does not divide over {count} processes")
        if count == 1:
            return
        if buckets is None and any(pad.length is None for pad in self.pad.values()):
            raise ValueError(
                "several processes cannot agree on the longest example of a batch; give Pad a length"
            )
        if not self._batching.is_whole(count):
            raise ValueError(
                f"last='keep' leaves batches that do not divide over {count} processes; use 'drop'"
            )


def _is_batch(batch: Any, count: int) -> bool:
    if type(batch) is not dict:
        return False
    for array in batch.values():  # noqa: SIM110 - written out, as it is done for every batch
        if type(array) is not np.ndarray or not array.ndim or len(array) != count:
            return False
    return True


def _batching(
    source: Source,
    batch_size: int,
    seed: int,
    shuffle: bool,
    epochs: int | None,
    last: Last,
    buckets: Buckets | None,
) -> Batching:
    if buckets is not None:
        check_plain(source, "pipeline with buckets")
        if len(buckets.lengths) != len(source):
            raise ValueError(
                f"there are {len(buckets.lengths)} lengths, but {len(source)} examples"
            )
        return Bucketed(buckets, batch_size, seed, shuffle, epochs, last)
    if batch_size > len(source) and not (epochs is not None and last == "keep"):
        raise ValueError(
            f"batch_size {batch_size} is larger than the data, which has {len(source)} examples"
        )
    return Consecutive(source, batch_size, seed, shuffle, epochs, last)


def _check_at_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}")
