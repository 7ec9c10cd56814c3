"""Streams: examples from an iterator, without random access."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ftrain.data.batching import Last
from ftrain.data.padding import Pad, pad_batch
from ftrain.data.source import Batch, join_examples


class Stream:
    """Batches of the examples, dicts of values, of a generator, a socket or a grain IterDataset.

    It lacks the guarantees of a Pipeline. A resumed run continues with whatever the iterable yields
    next (or with its beginning, if the iterable restarts), so it differs from an uninterrupted one,
    and no step can be replayed. Examples are shuffled only within a buffer. Each process must get
    its own examples.

    Args:
      shuffle_buffer: number of buffered examples, of which a random one comes next; 0 keeps the
        order.
      seed: of that choice.
    """

    def __init__(
        self,
        examples: Iterable[Mapping[str, Any]],
        *,
        batch_size: int,
        shuffle_buffer: int = 0,
        seed: int = 0,
        last: Last = "drop",
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
