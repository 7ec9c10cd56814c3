"""Prefetching: a thread prepares the next batches while the device works on this one."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from ftrain.coordination import Coordinator, EndOfData, LooperThread
from ftrain.data.pipeline import Pipeline
from ftrain.data.read_ahead import read_steps
from ftrain.data.source import size_of

DEPTH = 4  # prefetched lists of items
GRACE = 10.0  # seconds for a read in progress to end after close()
LARGE = 32 << 20  # bytes of a list from which on only two are prefetched
_POLL_SECONDS = 0.2  # between two checks of whether to keep waiting
T = TypeVar("T")


def feed(data: Pipeline | Iterable[Any], start: int = 0) -> "BatchIterator[Any]":
    """Return an iterator over the prefetched batches of `data` from step `start` on.

    A pipeline is read from exactly that step. A plain iterable yields whatever comes next, so a
    resumed run sees different batches than an uninterrupted one.
    """
    closed = threading.Event()
    check_data(data)
    if isinstance(data, Pipeline):
        results = read_steps(data, start, itertools.repeat(1), closed.is_set)
        lists = (result.batches for result in results)
    else:
        lists = ([batch] for batch in data)
    return BatchIterator(Prefetcher(lists, closed=closed))


def check_data(data: Pipeline | Iterable[Any]) -> Pipeline | Iterable[Any]:
    """Return `data`; raise TypeError unless it is a pipeline or an iterable of batches."""
    if isinstance(data, Mapping):
        raise TypeError(
            f"data is a dict with {', '.join(data)}: "
            "use Pipeline(ArraySource(data), batch_size=...)"
        )
    if not isinstance(data, (Pipeline, Iterable)):
        raise TypeError(
            f"data must be a Pipeline or an iterable of batches, got {type(data).__name__}"
        )
    return data


def bytes_of(batch: Any) -> int:
    """Return the bytes of the arrays of a batch."""
    leaves = [leaf for leaf in jax.tree.leaves(batch) if hasattr(leaf, "nbytes")]
    return sum(
        size_of({"": leaf}) if isinstance(leaf, np.ndarray) else leaf.nbytes for leaf in leaves
    )


class BatchIterator(Generic[T]):
    """The items of a Prefetcher, whose thread also ends when this object is garbage-collected."""

    def __init__(self, prefetcher: "Prefetcher[T]"):
        self._prefetcher = prefetcher

    def __iter__(self) -> "BatchIterator[T]":
        return self

    def __next__(self) -> T:
        return next(self._prefetcher)

    def close(self) -> None:
        """End the thread, and the reading threads or worker processes."""
        self._prefetcher.close()

    def __del__(self) -> None:
        with suppress(Exception):  # at interpreter exit anything may be missing
            self._prefetcher.close(grace=1.0)


class Prefetcher(Generic[T]):
    """An iterator over the items of `lists`, an iterator of lists that a thread runs ahead.

    The thread prepares lists until `depth` of them are ready, and resumes when half of those are
    used up: so it wakes up less often than items are taken. An error of the iterator is raised by
    `next`, after the items before it. While `next` waits it polls `stop`, and raises EndOfData once
    that returns True. `close` sets the event `closed`, which the iterator may watch. `size` returns
    the bytes of an item.
    """

    def __init__(
        self,
        lists: Iterator[list[T]],
        depth: int = DEPTH,
        stop: Callable[[], bool] = lambda: False,
        closed: threading.Event | None = None,
        size: Callable[[T], int] = bytes_of,
    ):
        self._lists = lists
        self._depth = depth
        self._stop = stop
        self._closed = closed or threading.Event()
        self._size = size
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
                if not self._changed.wait(_POLL_SECONDS) and self._stop():
                    raise EndOfData("the run was stopped while waiting for data")
            if self._ready:
                self._items = iter(self._ready.popleft())
                if self._is_full and len(self._ready) <= self._depth // 2:
                    self._is_full = False
                    self._changed.notify_all()
                return next(self)
        self._coordinator.join()  # raises the error that ended the thread, if any
        raise StopIteration

    def is_ready(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until `next` would not block; return True if so."""
        for item in self._items:
            self._items = itertools.chain([item], self._items)
            return True
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._ready) or self._coordinator.should_stop(), timeout
            )

    def close(self, grace: float | None = None) -> None:
        """End the thread and wait for it, up to `grace` seconds if a read of the source hangs."""
        self._closed.set()
        self._coordinator.request_stop()
        with self._changed:
            self._items = iter(())
            self._ready.clear()
            self._changed.notify_all()
        with suppress(Exception):  # errors of items that were never requested
            self._coordinator.join(
                stop_grace_period_secs=GRACE if grace is None else grace, ignore_live_threads=True
            )
        with suppress(ValueError):  # the generator is still running: its read hangs
            if isinstance(self._lists, Generator):
                self._lists.close()  # also ends its reading threads or processes

    def _work(self) -> None:
        """Prepare one list, then wait while enough are ready."""
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
            self._is_full = len(self._ready) >= (
                self._depth if sum(map(self._size, made)) < LARGE else 2
            )
            self._changed.notify_all()
            while self._is_full and not self._coordinator.should_stop():
                self._changed.wait()

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._coordinator.request_stop(error)
            self._changed.notify_all()
