"""Prefetching: a thread that makes the next batches while the device works on this one."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from ftrain.coordination import Coordinator, EndOfData, LooperThread
from ftrain.data.pieces import Piece, Put, pieces
from ftrain.data.pipeline import Pipeline
from ftrain.data.shapes import ShapeWatch
from ftrain.data.source import size_of

DEPTH = 4  # lists of items that wait, ready, ahead of use
GRACE = 10.0  # seconds in which a read that is under way may end when nobody wants it any more
_POLL = 0.2  # seconds between two looks at whether to go on waiting
LARGE = 32 << 20  # bytes of a list, of which only two wait
T = TypeVar("T")


def feed(data: Pipeline | Iterable[Any], start: int = 0) -> "Feed[Any]":
    """The batches of `data` from step `start` on, prefetched; `close` ends its thread.

    A pipeline is asked for exactly those steps. A plain iterable cannot be: it gives whatever it yields next, so a
    resumed run sees other batches than the first one did.
    """
    closed = threading.Event()
    made = pieces(check_data(data), start, itertools.repeat(1), stopped=closed.is_set)
    return Feed(Prefetcher(([piece.batch for piece in several] for several in made), closed=closed))


def feed_pieces(
    data: Pipeline | Iterable[Any],
    start: int,
    lengths: Iterator[int],
    put: Put,
    *,
    shapes: ShapeWatch | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> "Prefetcher[Piece]":
    """As `feed`, for calls that take several steps each."""
    closed = threading.Event()
    made = pieces(check_data(data), start, lengths, put, shapes, stopped=closed.is_set)
    return Prefetcher(made, stop=stop, closed=closed)


def check_data(data: Pipeline | Iterable[Any]) -> Pipeline | Iterable[Any]:
    if isinstance(data, Mapping):
        raise TypeError(
            f"data is a dict with {', '.join(data)}: use Pipeline(ArraySource(data), batch_size=...)"
        )
    if not isinstance(data, (Pipeline, Iterable)):
        raise TypeError(
            f"data must be a Pipeline or an iterable of batches, got {type(data).__name__}"
        )
    return data


class Feed(Generic[T]):
    """What a Prefetcher gives; nobody need close it: its thread ends when it is forgotten, too."""

    def __init__(self, prefetcher: "Prefetcher[T]"):
        self._prefetcher = prefetcher

    def __iter__(self) -> "Feed[T]":
        return self

    def __next__(self) -> T:
        return next(self._prefetcher)

    def close(self) -> None:
        """End the thread, and the threads or workers that it reads by."""
        self._prefetcher.close()

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of a program all sorts of things are gone
            self._prefetcher.close(grace=1.0)


class Prefetcher(Generic[T]):
    """An iterator over the items of an iterator of lists of them, which a thread runs ahead.

    The thread makes lists until `depth` of them wait, and goes on when half of those are used up: it wakes up less
    often than items are taken. What the iterator raises is raised by `next` here, after the items that came before it.
    While `next` waits it asks `stop` whether to go on waiting; if not, it raises EndOfData. `close` sets `closed`, for
    the iterator to look at.
    """

    def __init__(
        self,
        lists: Iterator[list[T]],
        depth: int = DEPTH,
        stop: Callable[[], bool] = lambda: False,
        closed: threading.Event | None = None,
    ):
        self._lists, self._depth, self._stop = lists, depth, stop
        self._closed = closed or threading.Event()
        self._ready: deque[list[T]] = deque()
        self._changed = threading.Condition()
        self._is_full = False
        self._items: Iterator[T] = iter(())
        self._coordinator = Coordinator()
        LooperThread(self._coordinator, target=self._work, name="ftrain-prefetch").start()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        for item in self._items:
            return item
        with self._changed:
            while not self._ready and not self._coordinator.should_stop():
                if not self._changed.wait(_POLL) and self._stop():
                    raise EndOfData("the run stops while it waits for data")
            if self._ready:
                self._items = iter(self._ready.popleft())
                if self._is_full and len(self._ready) <= self._depth // 2:
                    self._is_full = False
                    self._changed.notify_all()
                return next(self)
        self._coordinator.join()  # raises what ended the thread, unless it was the end of the data
        raise StopIteration

    def is_ready(self, timeout: float) -> bool:
        """Wait at most so long for `next` to have something, the end or an error included."""
        for item in self._items:
            self._items = itertools.chain([item], self._items)
            return True
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._ready) or self._coordinator.should_stop(), timeout
            )

    def close(self, grace: float | None = None) -> None:
        """End the thread; it is gone when this returns, unless a read of the source hangs for `grace` seconds."""
        self._closed.set()
        self._coordinator.request_stop()
        with self._changed:
            self._items = iter(())
            self._ready.clear()
            self._changed.notify_all()
        with suppress(Exception):  # of items that nobody has asked for
            self._coordinator.join(
                stop_grace_period_secs=GRACE if grace is None else grace, ignore_live_threads=True
            )
        with suppress(ValueError):  # of a read that hangs
            if isinstance(self._lists, Generator):
                self._lists.close()  # with the threads or processes that it has read by

    def _work(self) -> None:
        """Make one list, and wait while there are enough."""
        try:
            made = next(self._lists, None)
        except BaseException as error:
            self._end(error)
            raise
        if made is None:
            self._end(None)
            return
        with self._changed:
            self._ready.append(made)
            self._is_full = len(self._ready) >= (self._depth if _bytes_of(made) < LARGE else 2)
            self._changed.notify_all()
            while self._is_full and not self._coordinator.should_stop():
                self._changed.wait()

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._coordinator.request_stop(error)
            self._changed.notify_all()


def _bytes_of(items: list[Any]) -> int:
    batches = [item.batch if isinstance(item, Piece) else item for item in items]
    leaves = [leaf for leaf in jax.tree.leaves(batches) if hasattr(leaf, "nbytes")]
    return sum(
        size_of({"": leaf}) if isinstance(leaf, np.ndarray) else leaf.nbytes for leaf in leaves
    )
