"""Pieces: the input of one call of a compiled step, a batch or several batches stacked."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.data.pipeline import Pipeline
from ftrain.data.read_ahead import ReadRequest, ReadResult, read_ahead
from ftrain.data.shapes import ShapeWatch, check_numbers
from ftrain.data.source import size_of

CHUNK_BYTES = 1 << 20  # small batches are read several at a time, up to this many bytes
CHUNK_STEPS = 64  # and this many steps
CHUNK_SECONDS = 0.02  # and this time

Put = Callable[[Any, int], Any]  # (batch, steps in it) -> the same on the devices
_Counted = list[tuple[int, Any]]  # number of steps, and their batch or stacked batches


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The input of `count` steps; several batches are stacked along a new first axis."""

    count: int
    batch: Any
    kind: int = 0  # the number of the batch's form, from ShapeWatch
    examples: int = 0  # in the global batch of one step

    def split(self) -> "list[Piece]":
        """Return one piece for each step."""
        if self.count == 1:
            return [self]
        return [
            dataclasses.replace(self, count=1, batch=batch)
            for batch in _unstack(self.batch, self.count)
        ]


def stack(pieces: list[Piece]) -> Piece:
    """Stack pieces of one step each and of one form to one piece."""
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
    """Yield the input from step `start` on, in lists of pieces of the given lengths."""
    watch = shapes or ShapeWatch()
    expected = isinstance(data, Pipeline) and data.has_several_shapes
    if isinstance(data, Pipeline):
        made = _from_pipeline(data, start, lengths, watch, stopped)
    else:
        made = _from_batches(data, start, lengths, watch)
    step = start
    examples: dict[int, int] = {}  # in a global batch, by kind
    for counted in made:
        ready: list[Piece] = []
        for count, batch in counted:
            if put is None:  # nothing is compiled, so shapes do not matter
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
) -> Iterator[_Counted]:
    """Read the steps of a piece together, and several single steps: few large reads are cheaper."""
    chunk = _Chunk()
    for result in read_ahead(pipeline, _requests(pipeline, step, lengths, chunk), stopped):
        chunk.adapt(result)
        yield _split_result(result, watch, pipeline.has_several_shapes)


def _requests(
    pipeline: Pipeline, step: int, lengths: Iterator[int], chunk: "_Chunk"
) -> Iterator[ReadRequest]:
    """Yield the reads for pieces of the given lengths, up to the end of the data."""
    for length, run in itertools.groupby(lengths):
        while pieces := len(list(itertools.islice(run, chunk.steps if length == 1 else 1))):
            count = pieces * length
            if pipeline.steps is not None and step + count > pipeline.steps:
                if step < pipeline.steps:
                    yield ReadRequest(step, pipeline.steps - step, stacked=False)
                return
            yield ReadRequest(step, count, stacked=length > 1)
            step += count


class _Chunk:
    """The number of single steps read together: it grows while reads are fast and small."""

    def __init__(self) -> None:
        self.steps = 1

    def adapt(self, result: ReadResult) -> None:
        if result.request.stacked or result.request.count < self.steps:
            return
        most = min(CHUNK_STEPS, max(1, CHUNK_BYTES // max(size_of(result.batches[0]), 1)))
        if result.seconds < CHUNK_SECONDS / 4:
            self.steps = min(2 * self.steps, most)
        elif result.seconds > CHUNK_SECONDS:
            self.steps = max(self.steps // 2, 1)


def _split_result(result: ReadResult, watch: ShapeWatch, expected: bool) -> _Counted:
    request = result.request
    if result.is_stacked:
        return [(request.count, result.batches[0])]
    if not request.stacked:
        return [(1, batch) for batch in result.batches]
    kinds = [
        watch.kind(batch, request.step + at, expected=expected)
        for at, batch in enumerate(result.batches)
    ]
    return _stack_if_alike(result.batches, kinds)


def _stack_if_alike(batches: list[Any], kinds: list[int]) -> _Counted:
    """Stack the batches if they are of one kind."""
    if len(batches) > 1 and len(set(kinds)) == 1:
        return [(len(batches), jax.tree.map(_stack, *batches))]
    return [(1, batch) for batch in batches]


def _from_batches(
    batches: Iterable[Any], step: int, lengths: Iterator[int], watch: ShapeWatch
) -> Iterator[_Counted]:
    stream = iter(batches)
    for length in lengths:
        read, kinds, failure = _read(stream, step, length, watch)
        if read:
            is_full = len(read) == length
            yield _stack_if_alike(read, kinds) if is_full else [(1, batch) for batch in read]
        if failure is not None:
            raise failure
        if not read:
            return
        step += len(read)


def _read(
    stream: Iterator[Any], step: int, count: int, watch: ShapeWatch
) -> tuple[list[Any], list[int], BaseException | None]:
    """Return the next batches, their kinds, and the error raised after them, if any."""
    read: list[Any] = []
    kinds: list[int] = []
    try:
        for batch in itertools.islice(stream, count):
            kinds.append(watch.kind(batch, step + len(read)) if count > 1 else 0)
            read.append(batch)
    except BaseException as failure:  # noqa: BLE001 - raised after the batches before it
        return read, kinds, failure
    return read, kinds, None


def _unstack(batches: Any, count: int) -> list[Any]:
    return [jax.tree.map(lambda leaf, at=at: leaf[at], batches) for at in range(count)]


def _stack(*leaves: Any) -> Any:
    return jnp.stack(leaves) if isinstance(leaves[0], jax.Array) else np.stack(leaves)


def _examples(batch: Any) -> int:
    """Return the length of the first axis if all leaves share it, else 0."""
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else 0
