"""Pieces: the input of one call of a compiled step, a batch or several batches stacked."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.data import Pipeline, Prefetcher
from ftrain.data.prefetch import bytes_of, check_data
from ftrain.data.read_ahead import ReadResult, read_steps
from ftrain.data.shapes import ShapeWatch, check_numbers

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


def prefetch_pieces(
    data: Pipeline | Iterable[Any],
    start: int,
    lengths: Iterator[int],
    put: Put,
    *,
    shapes: ShapeWatch | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Prefetcher[Piece]:
    """Start a thread that makes the input from step `start` on, in pieces of the given lengths.

    Waiting for a piece ends when `stop` returns True.
    """
    closed = threading.Event()
    made = _make_pieces(
        check_data(data), start, lengths, put, shapes or ShapeWatch(), closed.is_set
    )
    return Prefetcher(made, stop=stop, closed=closed, size=lambda piece: bytes_of(piece.batch))


def _make_pieces(
    data: Pipeline | Iterable[Any],
    start: int,
    lengths: Iterator[int],
    put: Put,
    watch: ShapeWatch,
    stopped: Callable[[], bool],
) -> Iterator[list[Piece]]:
    """Yield the input from step `start` on, in lists of pieces of the given lengths."""
    expected = isinstance(data, Pipeline) and data.has_several_shapes
    if isinstance(data, Pipeline):
        results = read_steps(data, start, lengths, stopped)
        made = (_split_result(result, watch, expected) for result in results)
    else:
        made = _from_batches(data, start, lengths, watch)
    step = start
    examples: dict[int, int] = {}  # in a global batch, by kind
    for counted in made:
        ready: list[Piece] = []
        for count, batch in counted:
            single = batch if count == 1 else jax.tree.map(lambda leaf: leaf[0], batch)
            kind = watch.kind(single, step, expected=expected)
            if kind not in examples:
                shards = data.shard_count if isinstance(data, Pipeline) else 1
                examples[kind] = shards * _examples(check_numbers(single))
            ready.append(Piece(count, put(batch, count), kind, examples[kind]))
            step += count
        yield ready


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
