"""Pieces: what one call of a compiled step is given, a batch or the batches of several steps stacked to one."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.data.pipeline import Pipeline
from ftrain.data.shapes import ShapeWatch

CHUNK_BYTES = 4 << 20  # small batches are read several at a time, up to this many bytes
CHUNK_STEPS = 16

Put = Callable[[Any, int], Any]  # (batch, steps in it) -> the same on the devices


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The input of `count` steps; if there are several, their batches are stacked along a new first axis."""

    count: int
    batch: Any
    kind: int = 0  # the number of the form that a batch of it has
    examples: int = 0  # in a batch

    def split(self) -> "list[Piece]":
        """One piece for each step."""
        if self.count == 1:
            return [self]
        return [dataclasses.replace(self, count=1, batch=batch) for batch in _unstack(self.batch, self.count)]


def stack(pieces: list[Piece]) -> Piece:
    """Pieces of one step each, and of one form, as one piece."""
    batch = jax.tree.map(_stack, *(piece.batch for piece in pieces))
    return dataclasses.replace(pieces[0], count=len(pieces), batch=batch)


def pieces(
    data: Pipeline | Iterable[Any],
    start: int,
    lengths: Iterator[int],
    put: Put = lambda batch, count: batch,
    shapes: ShapeWatch | None = None,
) -> Iterator[list[Piece]]:
    """The input from step `start` on, in pieces of the given lengths, several of them at a time."""
    watch = shapes or ShapeWatch()
    if isinstance(data, Pipeline):
        made = _from_pipeline(data, start, lengths)
    else:
        made = _from_batches(data, start, lengths, watch)
    step = start
    for several in made:
        ready: list[Piece] = []
        for piece in several:
            single = piece.batch if piece.count == 1 else jax.tree.map(lambda leaf: leaf[0], piece.batch)
            kind = watch.kind(single, step)
            ready.append(Piece(piece.count, put(piece.batch, piece.count), kind, _examples(single)))
            step += piece.count
        yield ready


def _from_pipeline(pipeline: Pipeline, step: int, lengths: Iterator[int]) -> Iterator[list[Piece]]:
    """Single steps are read several at a time, and the steps of a piece together: a large read is cheaper than many."""
    chunk = _chunk_size(pipeline)
    for length, run in itertools.groupby(lengths):
        if length == 1:
            while several := len(list(itertools.islice(run, chunk))):
                yield [Piece(1, batch) for batch in _unstack(pipeline.batches(step, several), several)]
                step += several
        else:
            for _ in run:
                yield [Piece(length, pipeline.batches(step, length))]
                step += length


def _from_batches(
    batches: Iterable[Any], step: int, lengths: Iterator[int], watch: ShapeWatch
) -> Iterator[list[Piece]]:
    stream = iter(batches)
    for length in lengths:
        several, failure = _read(stream, step, length, watch)
        fits = len(several) == length > 1 and len({piece.kind for piece in several}) == 1
        if several:
            yield [stack(several)] if fits else several
        if failure is not None:
            raise failure
        if not several:
            return
        step += len(several)


def _read(stream: Iterator[Any], step: int, count: int, watch: ShapeWatch) -> tuple[list[Piece], BaseException | None]:
    """The next batches, and what went wrong after them, if something did."""
    read: list[Piece] = []
    try:
        for batch in itertools.islice(stream, count):
            read.append(Piece(1, batch, watch.kind(batch, step + len(read)) if count > 1 else 0))
    except BaseException as failure:  # noqa: BLE001 - raised when the batches before it have been handed over
        return read, failure
    return read, None


def _unstack(batches: Any, count: int) -> list[Any]:
    return [jax.tree.map(lambda leaf, at=at: leaf[at], batches) for at in range(count)]


def _stack(*leaves: Any) -> Any:
    return jnp.stack(leaves) if isinstance(leaves[0], jax.Array) else np.stack(leaves)


def _examples(batch: Any) -> int:
    """The length of the first axis, if all leaves share one."""
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else 0


def _chunk_size(pipeline: Pipeline) -> int:
    size = sum(array.nbytes for array in pipeline.batch(0).values())
    return min(CHUNK_STEPS, max(1, CHUNK_BYTES // max(size, 1)))
