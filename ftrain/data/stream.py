"""Streams: examples that come one after the other, and cannot be asked for by number."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ftrain.data.batching import Last
from ftrain.data.changing import join
from ftrain.data.padding import Pad, pad_batch
from ftrain.data.source import Batch


class Stream:
    """Batches of the examples, dicts of values, that an iterable yields: a generator, a socket, a grain IterDataset.

    What a Pipeline promises, this cannot: a run that is resumed goes on with whatever comes next (or, of an iterable
    that starts anew each time, with its beginning), so it is not the run it would have been, and there is no replaying
    of a step by its number. Examples are shuffled only within a buffer, and each process of several must be given
    examples of its own.

    Args:
      shuffle_buffer: how many examples wait, of which a random one is taken next; 0 keeps their order.
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
                f"batch_size must be >= 1 and shuffle_buffer >= 0, got {batch_size} and {shuffle_buffer}"
            )
        if last not in ("drop", "keep"):
            raise ValueError(f"last must be 'drop' or 'keep', got {last!r}")
        if not isinstance(examples, Iterable):
            hint = ": call it" if callable(examples) else ""
            raise TypeError(
                f"a Stream takes an iterable of examples, got {type(examples).__name__}{hint}"
            )
        self._examples, self._size, self._last, self._pad = (
            examples,
            batch_size,
            last,
            dict(pad or {}),
        )
        self._buffer, self._seed = shuffle_buffer, seed

    def __iter__(self) -> Iterator[Batch]:
        examples = iter(self._examples)
        examples = _shuffled(examples, self._buffer, self._seed) if self._buffer else examples
        while taken := [dict(example) for example in itertools.islice(examples, self._size)]:
            if len(taken) < self._size and self._last == "drop":
                return
            yield pad_batch(join(taken, "the stream"), self._pad)


def _shuffled(examples: Iterator[Any], size: int, seed: int) -> Iterator[Any]:
    rng = np.random.default_rng(seed)
    waiting = list(itertools.islice(examples, size))
    for example in examples:
        chosen = int(rng.integers(len(waiting)))
        yield waiting[chosen]
        waiting[chosen] = example
    for chosen in rng.permutation(len(waiting)):
        yield waiting[chosen]
