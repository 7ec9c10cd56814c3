"""Pieces: what one call of a compiled step is given, a batch or the batches of several steps stacked to one."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.data.pipeline import Pipeline
from ftrain.data.reading import Done, Read, read_ahead
from ftrain.data.shapes import ShapeWatch, check_numbers
from ftrain.data.source import size_of

CHUNK_BYTES = 1 << 20  # small batches are read several at a time, up to this many bytes
CHUNK_STEPS = 64
CHUNK_SECONDS = 0.02  # that reading them should take at most

Put = Callable[[Any, int], Any]  # (batch, steps in it) -> the same on the devices
_Several = list[tuple[int, Any]]  # steps and their batch or, of several, their stacked batches


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The input of `count` steps; if there are several, their batches are stacked along a new first axis."""

    count: int
    batch: Any
    kind: int = 0  # the number of the form that a batch of it has
    examples: int = 0  # in a batch, of all processes together

    def split(self) -> "list[Piece]":
        """One piece for each step."""
        if self.count == 1:
            return [self]
        return [
            dataclasses.replace(self, count=1, batch=batch)
            for batch in _unstack(self.batch, self.count)
        ]


def stack(pieces: list[Piece]) -> Piece:
    """Pieces of one step each, and of one form, as one piece."""
    batch = jax.tree.map(_stack, *(piece.batch for piece in pieces))
    return dataclasses.replace(pieces[0], count=len(pieces), batch=batch)


def pieces(
    data: Pipeline | Iterable[Any],
    start: int,
    lengths: Iterator[int],
    put: Put | None = None,
    shapes: ShapeWatch | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[list[Piece]]:
    """The input from step `start` on, in pieces of the given lengths, several at a time, until it is `stopped`."""
    watch = shapes or ShapeWatch()
    expected = isinstance(data, Pipeline) and data.has_several_shapes
    if isinstance(data, Pipeline):
        made = _from_pipeline(data, start, lengths, watch, stopped)
    else:
        made = _from_batches(data, start, lengths, watch)
    step = start
    examples: dict[int, int] = {}  # in a batch, by its kind
    for several in made:
        ready: list[Piece] = []
        for count, batch in several:
            if put is None:  # nothing is compiled, so forms do not matter
                ready.append(Piece(count, batch))
                continue
            single = batch if count == 1 else jax.tree.map(lambda leaf: leaf[0], batch)
            kind = watch.kind(single, step, expected=expected)
            if kind not in examples:
                shards = data.shard_count if isinstance(data, Pipeline) else 1
                examples[kind] = shards * _examples(check_numbers(single))
            ready.append(Piece(count, put(batch, count), kind, examples[kind]))
            step += count
        yield ready


def _from_pipeline(
    pipeline: Pipeline,
    step: int,
    lengths: Iterator[int],
    watch: ShapeWatch,
    stopped: Callable[[], bool],
) -> Iterator[_Several]:
    """Single steps are read several at a time, and the steps of a piece together: a large read is cheaper than many."""
    chunk = _Chunk()
    for done in read_ahead(pipeline, _orders(pipeline, step, lengths, chunk), stopped):
        chunk.adapt(done)
        yield _pieces_of(done, watch, pipeline.has_several_shapes)


def _orders(
    pipeline: Pipeline, step: int, lengths: Iterator[int], chunk: "_Chunk"
) -> Iterator[Read]:
    """What to read for pieces of the given lengths, up to where the data end."""
    for length, run in itertools.groupby(lengths):
        while pieces := len(list(itertools.islice(run, chunk.steps if length == 1 else 1))):
            count = pieces * length
            if pipeline.steps is not None and step + count > pipeline.steps:
                if step < pipeline.steps:
                    yield Read(step, pipeline.steps - step, stacked=False)
                return
            yield Read(step, count, stacked=length > 1)
            step += count


class _Chunk:
    """How many single steps are read together: more and more, as long as that is quick and small."""

    def __init__(self) -> None:
        self.steps = 1

    def adapt(self, done: Done) -> None:
        if done.order.stacked or done.order.count < self.steps:
            return
        most = min(CHUNK_STEPS, max(1, CHUNK_BYTES // max(size_of(done.batches[0]), 1)))
        if done.seconds < CHUNK_SECONDS / 4:
            self.steps = min(2 * self.steps, most)
        elif done.seconds > CHUNK_SECONDS:
            self.steps = max(self.steps // 2, 1)


def _pieces_of(done: Done, watch: ShapeWatch, expected: bool) -> _Several:
    order = done.order
    if done.is_stacked:
        return [(order.count, done.batches[0])]
    if not order.stacked:
        return [(1, batch) for batch in done.batches]
    kinds = [
        watch.kind(batch, order.step + at, expected=expected)
        for at, batch in enumerate(done.batches)
    ]
    return _together(done.batches, kinds)


def _together(batches: list[Any], kinds: list[int]) -> _Several:
    """Batches stacked, if they are of one kind."""
    if len(batches) > 1 and len(set(kinds)) == 1:
        return [(len(batches), jax.tree.map(_stack, *batches))]
    return [(1, batch) for batch in batches]


def _from_batches(
    batches: Iterable[Any], step: int, lengths: Iterator[int], watch: ShapeWatch
) -> Iterator[_Several]:
    stream = iter(batches)
    for length in lengths:
        read, kinds, failure = _read(stream, step, length, watch)
        if read:
            yield _together(read, kinds) if len(read) == length else [(1, batch) for batch in read]
        if failure is not None:
            raise failure
        if not read:
            return
        step += len(read)


def _read(
    stream: Iterator[Any], step: int, count: int, watch: ShapeWatch
) -> tuple[list[Any], list[int], BaseException | None]:
    """The next batches, their kinds, and what went wrong after them, if something did."""
    read: list[Any] = []
    kinds: list[int] = []
    try:
        for batch in itertools.islice(stream, count):
            kinds.append(watch.kind(batch, step + len(read)) if count > 1 else 0)
            read.append(batch)
    except BaseException as failure:  # noqa: BLE001 - raised when the batches before it have been handed over
        return read, kinds, failure
    return read, kinds, None


def _unstack(batches: Any, count: int) -> list[Any]:
    return [jax.tree.map(lambda leaf, at=at: leaf[at], batches) for at in range(count)]


def _stack(*leaves: Any) -> Any:
    return jnp.stack(leaves) if isinstance(leaves[0], jax.Array) else np.stack(leaves)


def _examples(batch: Any) -> int:
    """The length of the first axis, if all leaves share one."""
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else 0
