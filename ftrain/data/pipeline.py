"""Pipelines: batch = f(seed, step), for any process and in any order.

A Stream makes batches of an iterator, without these guarantees.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np

from ftrain.coordination import EndOfData
from ftrain.data.batching import (
    Batching,
    Bucketed,
    Buckets,
    Consecutive,
    Last,
    Pad,
    check_pads,
    pad_batch,
)
from ftrain.data.derived_sources import call, name_of
from ftrain.data.masking import Padded, blank_padding
from ftrain.data.order import check_has_no_order
from ftrain.data.source import (
    Batch,
    Example,
    Source,
    check_batch,
    describe,
    join_examples,
    split_examples,
    stack_objects,
    where,
)

Transform = Callable[[Example, np.random.Generator], Example]


class Pipeline:
    """Batches of a source, each a pure function of the seed and the step.

    Every epoch has its own permutation, and epochs follow each other without a gap: no example is
    dropped, and every batch is full. Process `shard_index` of `shard_count` gets its slice of the
    global batch. So the examples of a step do not depend on the number of processes, threads or
    worker processes that load them.

    Args:
      epochs: number of epochs, after which the data end; None repeats forever.
      last: "drop" or "keep" a last batch that is not full; or "pad" it with zeros, and give every
        batch an entry "mask", 1 for an example and 0 for padding, unless the examples have one.
      buckets: batch examples of similar length, instead of consecutive ones.
      pad: how to pad each feature of unequal lengths.
      transform: called with each example and a random generator, seeded by step and example.
      threads: number of threads that read and decode ahead; they call the source concurrently.
      workers: number of processes that do so, for transforms that are heavy Python code. The source
        and all functions are sent to them, so these must be importable.
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
        _check_minimum(1, batch_size=batch_size, epochs=epochs, threads=threads)
        _check_minimum(0, seed=seed, workers=workers)
        if last not in get_args(Last):
            raise ValueError(f"last must be 'drop', 'keep' or 'pad', got {last!r}")
        if not (hasattr(source, "__len__") and hasattr(source, "read")):
            hint = "; use ArraySource(arrays)" if isinstance(source, Mapping) else ""
            raise TypeError(
                f"a source needs a length and read(indices), got {type(source).__name__}{hint}"
            )
        check_pads(pad or {})
        if not len(source):
            raise ValueError(f"{describe(source)} has no examples")
        self.source = source
        self.batch_size = operator.index(batch_size)
        self.seed = operator.index(seed)
        self.shuffle = bool(shuffle)
        self.epochs = None if epochs is None else operator.index(epochs)
        self.pad = dict(pad or {})
        self.transform = transform
        self.threads = threads
        self.workers = workers
        self.shard_index = shard_index
        self.shard_count = shard_count
        self._batching = self._make_batching(last, buckets)
        self.steps = self._batching.steps  # the number of batches; None if they never end
        if self.steps == 0:
            raise ValueError(
                f"{epochs} epochs of {describe(source)} fill no batch; "
                "use a smaller batch_size, or last='keep' or 'pad'"
            )
        self.dropped = self._batching.dropped  # the number of examples that last="drop" drops
        self._check_shards(buckets)
        has_lengths = all(pad.length is not None for pad in self.pad.values())
        self.is_uniform: bool = self._batching.is_uniform and has_lengths
        self.has_several_shapes = not self._batching.is_uniform  # requested by the user

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from step 0 on; `feed` prefetches and starts at any step."""
        return map(self.batch, itertools.count() if self.steps is None else range(self.steps))

    def batch(self, step: int) -> Batch:
        """Return this process's part of the batch of step `step`, counted from 0."""
        return self._finish(self._read(step, 1), step)

    def batches(self, step: int, count: int) -> Batch:
        """Read `count` batches from `step` on at once, stacked along a new first axis."""
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
        """Return `count` batches from `step` on as a list: batches of buckets differ in shape."""
        return self._cut(self._read(step, count), step, count)

    def _cut(self, arrays: Batch, step: int, count: int) -> list[Batch]:
        sizes = [size // self.shard_count for size in self._batching.sizes(step, count)]
        bounds = enumerate(itertools.pairwise(itertools.accumulate(sizes, initial=0)), step)
        return [
            self._finish({name: array[start:end] for name, array in arrays.items()}, at)
            for at, (start, end) in bounds
        ]

    def indices(self, step: int, count: int = 1) -> np.ndarray:
        """Return the indices of this process's examples in `count` batches from `step` on."""
        if type(step) is not int:
            step = operator.index(step)  # a numpy integer would overflow
        if step < 0 or count < 1:
            raise ValueError(
                f"step must be >= 0, got {step}" if step < 0 else f"count must be >= 1, got {count}"
            )
        if self.steps is not None and step + count > self.steps:
            raise EndOfData(
                f"the data end after {self.steps} batches; batch {step + count} was requested"
            )
        return self._shares(self._batching.indices(step, count), step, count)

    def mask(self, step: int, count: int = 1) -> np.ndarray:
        """Return 1 for each of this process's examples in `count` batches, and 0 for padding."""
        if not isinstance(self._batching, Padded):
            size = sum(self._batching.sizes(step, count)) // self.shard_count
            return np.ones(size, np.float32)
        return self._shares(self._batching.mask(step, count), step, count)

    def count_steps(self, epochs: float) -> int:
        """Return the number of batches in `epochs` epochs, which need not be a whole number.

        An unfinished last batch counts with `last="keep"` or "pad". A pipeline without a limit of
        epochs fills it from the next epoch.
        """
        if isinstance(epochs, bool) or not 0 < epochs < math.inf:
            raise ValueError(f"epochs must be > 0, got {epochs!r}")
        if self.epochs is not None and epochs > self.epochs:
            raise ValueError(f"the data end after {self.epochs} epochs, got epochs {epochs}")
        steps = self._batching.count(epochs)
        if not steps:
            raise ValueError(
                f"{epochs} epochs of {describe(self.source)} fill no batch of {self.batch_size}"
            )
        return steps

    def summary(self) -> dict[str, Any]:
        """Return what all batches depend on besides the source's contents, as JSON values."""
        return {
            "examples": len(self.source),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
        }

    def identity(self, step: int) -> dict[str, Any]:
        """Return what the batch of a step is made of, as JSON values."""
        of_step = {
            "source": describe(self.source),
            "step": step,
            "indices": self.indices(step).tolist(),
        }
        return self.summary() | of_step

    def _finish(self, batch: Batch, step: int) -> Batch:
        for array in batch.values():
            if array.dtype.hasobject:
                batch = {name: stack_objects(array) for name, array in batch.items()}
                break
        if not self.pad:
            return batch
        return pad_batch(
            batch,
            self.pad,
            self._batching.length(step),
            where=lambda row: where(self.source, int(self.indices(step)[row])),
        )

    def _shares(self, rows: np.ndarray, step: int, count: int) -> np.ndarray:
        """Return this process's part of each of `count` batches, whose rows are concatenated."""
        if self.shard_count == 1:
            return rows
        starts = np.cumsum([0, *self._batching.sizes(step, count)]).tolist()
        return np.concatenate(
            [self._share(rows[start:end]) for start, end in itertools.pairwise(starts)]
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
            if self.transform is not None:
                batch = self._apply_transform(self.transform, batch, indices, step, count)
            if isinstance(self._batching, Padded):
                batch = blank_padding(batch, self.mask(step, count), self.pad)
            return batch
        except StopIteration as error:  # a generator would swallow it
            raise EndOfData(f"{describe(self.source)} has no more examples") from error
        except Exception as error:
            steps = (
                f"step {step + 1}" if count == 1 else f"the steps from {step + 1} to {step + count}"
            )
            error.add_note(f"while reading the input of {steps} from {describe(self.source)}")
            raise

    def _apply_transform(
        self, transform: Transform, batch: Batch, indices: np.ndarray, step: int, count: int
    ) -> Batch:
        generators = self._generators(step, count)
        made = [
            call(transform, example, rng, place=functools.partial(where, self.source, int(index)))
            for example, index, rng in zip(split_examples(batch), indices, generators, strict=True)
        ]
        return join_examples(made, name_of(transform))

    def _generators(self, step: int, count: int) -> Iterator[np.random.Generator]:
        """Yield a generator per example, seeded by its step and row in the global batch."""
        for at, size in enumerate(self._batching.sizes(step, count), step):
            for row in self._share(np.arange(size)).tolist():
                yield np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, row, at]))

    def _make_batching(self, last: Last, buckets: Buckets | None) -> Batching:
        if last == "pad":
            return Padded(self._make_batching("keep", buckets))
        examples = len(self.source)
        common = (self.batch_size, self.seed, self.shuffle, self.epochs, last)
        if buckets is not None:
            check_has_no_order(self.source, "pipeline with buckets")
            if len(buckets.lengths) != examples:
                raise ValueError(
                    f"buckets.lengths must have an entry for each of the {examples} examples, "
                    f"got {len(buckets.lengths)}"
                )
            return Bucketed(buckets, *common)
        if self.batch_size > examples and not (self.epochs is not None and last == "keep"):
            raise ValueError(
                f"batch_size {self.batch_size} is larger than the data, "
                f"which has {examples} examples"
            )
        return Consecutive(self.source, *common)

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
                "Pad needs a length with several processes: each sees only its part of a batch"
            )
        if not self._batching.is_whole(count):
            raise ValueError(
                f"last='keep' makes batches that do not divide over {count} processes; "
                "use 'drop' or 'pad'"
            )


class Stream:
    """Batches of the examples, dicts of values, of a generator, a socket or a grain IterDataset.

    It lacks the guarantees of a Pipeline. A resumed run continues with the next example that the
    iterable yields, or its first if the iterable restarts. So the run differs from an uninterrupted
    one, and no step can be replayed. Examples are shuffled only within a buffer. Each process must
    get its own examples.

    Args:
      shuffle_buffer: number of buffered examples, from which a random one is taken; 0 keeps the
        order.
      seed: of the shuffling.
    """

    def __init__(
        self,
        examples: Iterable[Mapping[str, Any]],
        *,
        batch_size: int,
        shuffle_buffer: int = 0,
        seed: int = 0,
        last: Literal["drop", "keep"] = "drop",
        pad: Mapping[str, Pad] | None = None,
    ):
        if batch_size < 1 or shuffle_buffer < 0:
            raise ValueError(
                "batch_size must be >= 1 and shuffle_buffer >= 0, "
                f"got {batch_size} and {shuffle_buffer}"
            )
        if last not in ("drop", "keep"):
            raise ValueError(f"last must be 'drop' or 'keep', got {last!r}")
        if not isinstance(examples, Iterable):
            hint = ": call it" if callable(examples) else ""
            raise TypeError(
                f"a Stream takes an iterable of examples, got {type(examples).__name__}{hint}"
            )
        self._examples = examples
        self._size = batch_size
        self._last = last
        self._pad = dict(pad or {})
        self._buffer = shuffle_buffer
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        examples = iter(self._examples)
        if self._buffer:
            examples = _shuffle(examples, self._buffer, self._seed)
        while taken := [dict(example) for example in itertools.islice(examples, self._size)]:
            if len(taken) < self._size and self._last == "drop":
                return
            yield pad_batch(join_examples(taken, "the stream"), self._pad)


def _shuffle(examples: Iterator[Any], size: int, seed: int) -> Iterator[Any]:
    rng = np.random.default_rng(seed)
    buffer = list(itertools.islice(examples, size))
    for example in examples:
        chosen = int(rng.integers(len(buffer)))
        yield buffer[chosen]
        buffer[chosen] = example
    for chosen in rng.permutation(len(buffer)):
        yield buffer[chosen]


def _is_batch(batch: Any, count: int) -> bool:
    if type(batch) is not dict:
        return False
    for array in batch.values():  # a loop, because this runs for every batch: faster than all()
        if type(array) is not np.ndarray or not array.ndim or len(array) != count:
            return False
    return True


def _check_minimum(minimum: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be >= {minimum}, got {value}")
