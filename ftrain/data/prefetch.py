"""Prefetching: a thread that makes the next batches while the device works on this one."""

import itertools
import queue
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from ftrain.coordination import Coordinator, EndOfData, LooperThread
from ftrain.data.pieces import Piece, Put, pieces
from ftrain.data.pipeline import Pipeline

DEPTH = 2  # lists of items that wait, ready, ahead of use
T = TypeVar("T")


def feed(data: Pipeline | Iterable[Any], start: int = 0) -> "Iterator[Any]":
    """The batches of `data` from step `start` on, prefetched; `close` ends its thread.

    A pipeline is asked for exactly those steps. A plain iterable cannot be: it gives whatever it yields next, so a
    resumed run sees other batches than the first one did.
    """
    made = pieces(check_data(data), start, itertools.repeat(1))
    return Prefetcher([piece.batch for piece in several] for several in made)


def feed_pieces(data: Pipeline | Iterable[Any], start: int, lengths: Iterator[int], put: Put) -> "Prefetcher[Piece]":
    """As `feed`, for calls that take several steps each."""
    return Prefetcher(pieces(check_data(data), start, lengths, put))


def check_data(data: Pipeline | Iterable[Any]) -> Pipeline | Iterable[Any]:
    if isinstance(data, Mapping):
        raise TypeError(f"data is a dict with {', '.join(data)}: use Pipeline(ArraySource(data), batch_size=...)")
    if not isinstance(data, (Pipeline, Iterable)):
        raise TypeError(f"data must be a Pipeline or an iterable of batches, got {type(data).__name__}")
    return data


class Prefetcher(Generic[T]):
    """An iterator over the items of an iterator of lists of them, which a thread runs ahead.

    What the iterator raises is raised by `next` here, after the items that came before it.
    """

    def __init__(self, lists: Iterator[list[T]], depth: int = DEPTH):
        self._lists = lists
        self._ready: queue.Queue[list[T] | None] = queue.Queue(depth)
        self._items: Iterator[T] = iter(())
        self._ended = False
        self._coordinator = Coordinator()
        LooperThread(self._coordinator, target=self._work, name="ftrain-prefetch").start()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        for item in self._items:
            return item
        if self._ended:
            raise StopIteration
        several = self._ready.get()
        if several is not None:
            self._items = iter(several)
            return next(self)
        self._ended = True
        self._coordinator.join()  # raises what ended the thread, unless it was the end of the data
        raise StopIteration

    def close(self) -> None:
        """End the thread; it is gone when this returns, unless a read of the source hangs."""
        self._ended, self._items = True, iter(())
        self._coordinator.request_stop()
        with suppress(Exception):  # of items that nobody has asked for
            self._coordinator.join(stop_grace_period_secs=10, ignore_live_threads=True)

    def _work(self) -> None:
        try:
            several = next(self._lists)
        except StopIteration:
            self._put(None)
            raise EndOfData from None
        except BaseException:
            self._put(None)
            raise
        self._put(several)

    def _put(self, several: list[T] | None) -> None:
        while not self._coordinator.should_stop():
            try:
                self._ready.put(several, timeout=0.05)
                break
            except queue.Full:
                continue
