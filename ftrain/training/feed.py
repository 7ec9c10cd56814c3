"""The feed of a run: batches read ahead by a thread, put on the devices, and taken by the loop.

source -> read-ahead thread (`prefetch_pieces`) -> `Feed.take`
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from ftrain.coordination import EndOfData
from ftrain.data import Pipeline
from ftrain.data.shapes import ShapeWatch
from ftrain.training.consensus import Consensus
from ftrain.training.fusion import gaps
from ftrain.training.hook import Hook, Report, change_batch
from ftrain.training.loss import Batch
from ftrain.training.pieces import Piece, Put, prefetch_pieces, stack
from ftrain.training.replica_reduction import CONTRIBUTES
from ftrain.training.stopping import DATA_ENDED, Stopping
from ftrain.training.trigger import Trigger

FINISHED = (StopIteration, EndOfData)  # exceptions that end a run cleanly, wherever they come from


class Feed:
    """The input of a run, from any step on.

    A thread makes pieces ahead of time: one batch each, or the batches of several fused steps. How
    many steps a piece has is a guess, because hooks may change their triggers, so `take` splits a
    piece that is too long and keeps the rest.

    Args:
      put: puts a batch on the devices.
      prepare: changes a batch on the host before that, given its step.
      consensus: the other processes. Iterators may end at different steps in each of them, so all
        processes agree before each step that everyone has data. A pipeline ends at the same step.
      straggler_timeout: seconds after which a step runs without the data of this process.
      stopping: asked while the feed waits for data that may no longer be needed.
    """

    def __init__(
        self,
        data: Pipeline | Iterable[Any],
        put: Put,
        prepare: Callable[[int, Batch], Batch] | None,
        consensus: Consensus | None,
        straggler_timeout: float | None,
        stopping: Stopping,
    ):
        is_endless = isinstance(data, Pipeline) and data.is_uniform and data.steps is None
        if straggler_timeout and not is_endless:
            raise ValueError(
                "straggler_timeout needs a Pipeline whose batches have one shape and never end: "
                "no epochs"
            )
        self.prepares = prepare is not None
        self._data = data
        self._put = put
        self._prepare = prepare
        self._stopping = stopping
        self._consensus = None if isinstance(data, Pipeline) else consensus
        self._is_alone = consensus is None
        self._straggling = _Straggling(straggler_timeout, put) if straggler_timeout else None
        self._shapes = ShapeWatch()
        self._changed_shapes = ShapeWatch()
        self._pieces: Any = None  # the read-ahead thread, once started
        self._spare: deque[Piece] = deque()  # taken from the thread, but not used yet
        self._step = 0  # the step before the one that the loop waits for
        self._agreed = 0  # the newest step for which all processes exchanged whether they have data
        self._has_failed = False

    @property
    def can_resume(self) -> bool:
        """Whether there is data after a recovery: an iterator that raised an error has no more."""
        return isinstance(self._data, Pipeline) or not self._has_failed

    def start(self, step: int, triggers: Sequence[Trigger], length: Callable[[], int]) -> None:
        """Start or restart after `step`; `length` is the number of steps in a fused call.

        Data without random access continue where they are.
        """
        self._step = step
        if self._pieces is not None and not isinstance(self._data, Pipeline):
            return
        self.close()
        self._spare.clear()
        self._pieces = prefetch_pieces(
            self._data,
            step,
            _piece_lengths(triggers, step, length),
            self._prepare_and_put(step),
            shapes=self._shapes,
            stop=lambda: self._stopping.is_coming(self._step),
        )

    def take(self, step: int, limit: float, kind: int, length: int = 1) -> Piece:
        """Return the input of the next steps after `step`, at most `limit` of them.

        A piece of several steps is only returned if its batches have the form `kind`. Batches that
        were read ahead one by one are stacked if a call takes `length` steps by now. Raises
        EndOfData or StopIteration at the end of the data.
        """
        self._step = step
        if self._straggling is not None:
            return self._next_or_zeros(self._straggling)
        if self._consensus is None:
            piece = self._next(limit, kind)
            if (
                1 < length <= limit
                and piece.count == 1
                and piece.kind == kind
                and isinstance(self._data, Pipeline)
            ):
                return self._stacked(piece, length)
            return piece
        try:
            piece = self._next(1)
        except FINISHED:
            piece = None
        examples = None if piece is None else piece.examples
        if not self._all_have_data(self._consensus, step + 1, examples) or piece is None:
            raise EndOfData(DATA_ENDED)
        return piece

    def change(self, piece: Piece, step: int, hooks: Sequence[Hook], report: Report) -> Piece:
        """Return the input of the step after `step` with the entries that `hooks` put into it."""
        batch = change_batch(hooks, report, piece.batch)
        if not self._is_alone:  # each process feeds its part of an entry
            batch = {
                name: leaf if isinstance(leaf, jax.Array) else self._put(leaf, 1)
                for name, leaf in batch.items()
            }
        return dataclasses.replace(piece, batch=batch, kind=self._changed_shapes.kind(batch, step))

    def give_back(self, pieces: Sequence[Piece]) -> None:
        """Return pieces that were taken but not used."""
        self._spare.extendleft(reversed(pieces))

    def finish(self, step: int) -> None:
        """Report that `step` was the last, to processes that wait for the data of this one."""
        if self._consensus is not None and self._agreed <= step:
            self._all_have_data(self._consensus, step + 1, None)

    def close(self) -> None:
        """End the thread."""
        if self._pieces is not None:
            self._pieces.close()

    def _next(self, limit: float, kind: int | None = None) -> Piece:
        assert self._pieces is not None
        try:
            piece = self._spare.popleft() if self._spare else next(self._pieces)
        except Exception:
            self._has_failed = True
            raise
        if piece.count > limit or (piece.count > 1 and piece.kind != kind):
            piece, *rest = piece.split()
            self.give_back(rest)
        return piece

    def _stacked(self, first: Piece, length: int) -> Piece:
        """Return `first` and later pieces as one; only `first` if they are of another form."""
        pieces = [first]
        with suppress(Exception):  # the next call raises it again, after these pieces
            while len(pieces) < length and pieces[-1].count == 1 and pieces[-1].kind == first.kind:
                pieces.append(self._spare.popleft() if self._spare else next(self._pieces))
        if len(pieces) == length and all(
            piece.count == 1 and piece.kind == first.kind for piece in pieces
        ):
            several = stack(pieces)
            return dataclasses.replace(several, batch=self._put(several.batch, length))
        self.give_back(pieces[1:])
        return first

    def _next_or_zeros(self, straggling: "_Straggling") -> Piece:
        """Return the next piece, or one of zeros if it is late; always wait for the first piece."""
        is_late = (
            straggling.last is not None
            and not self._spare
            and not self._pieces.is_ready(straggling.timeout)
        )
        if is_late:
            return straggling.zeros()
        piece = self._next(1)
        straggling.last = piece
        return piece

    def _all_have_data(self, consensus: Consensus, step: int, examples: int | None) -> bool:
        self._agreed = step
        return consensus.all_have(f"the data of step {step}", examples)

    def _prepare_and_put(self, step: int) -> Put:
        """Return how batches after `step` are put on the devices; the read-ahead thread does it."""
        put = self._put if self._straggling is None else self._straggling.put
        prepare = self._prepare
        if prepare is None:
            return put
        steps = itertools.count(step + 1)

        def prepare_and_put(batch: Batch, count: int) -> Batch:
            return put(prepare(next(steps), batch), count)

        return prepare_and_put


class _Straggling:
    """Replaces data that are late by a batch of zeros, marked as not contributing to the step."""

    def __init__(self, timeout: float, put: Put):
        self.timeout = timeout
        self.last: Piece | None = None  # the newest piece that was not late
        self._put_on_devices = put
        self._example: dict[str, Any] | None = None  # a batch on the host

    def put(self, batch: Any, count: int) -> Any:
        """Put a batch on the devices, marked as contributing."""
        if not isinstance(batch, dict):
            raise TypeError(
                f"straggler_timeout needs batches that are dicts, got a {type(batch).__name__}"
            )
        self._example = self._example or batch
        weights = np.ones(_rows(batch), np.float32)
        return self._put_on_devices(batch | {CONTRIBUTES: weights}, count)

    def zeros(self) -> Piece:
        """Return a piece of zeros, marked as not contributing."""
        assert self._example is not None
        assert self.last is not None
        zeros: dict[str, Any] = jax.tree.map(np.zeros_like, self._example)
        zeros[CONTRIBUTES] = np.zeros(_rows(self._example), np.float32)
        return dataclasses.replace(self.last, batch=self._put_on_devices(zeros, 1))


def _rows(batch: dict[str, Any]) -> int:
    return len(next(iter(batch.values())))


def _piece_lengths(
    triggers: Sequence[Trigger], start: int, length: Callable[[], int]
) -> Iterator[int]:
    """Yield the number of steps of each piece: fused up to the steps at which hooks are due."""
    for gap in gaps(triggers, start):
        while gap > 0:
            steps = length()
            steps = steps if gap >= steps else 1
            yield steps
            gap -= steps
