"""Prefetching: a thread that makes the next batches while the device works on this one."""

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ftrain.data.pipeline import Pipeline

CHUNK_BYTES = 1 << 20  # small batches are read several at a time, up to this many bytes
CHUNK_STEPS = 16
DEPTH = 2  # chunks that wait, ready, ahead of use


def feed(data: Pipeline | Iterable[Any], start: int = 0) -> "Prefetcher":
    """The batches of `data` from step `start` on, prefetched.

    A pipeline is asked for exactly those steps. A plain iterable cannot be: it gives whatever it yields next, so a
    resumed run sees other batches than the first one did.
    """
    if isinstance(data, Mapping):
        raise TypeError(f"data is a dict with {', '.join(data)}: use Pipeline(ArraySource(data), batch_size=...)")
    if isinstance(data, Pipeline):
        return Prefetcher(data.chunks(start, _chunk_size(data)))
    return Prefetcher([batch] for batch in data)


class Prefetcher:
    """An iterator over the batches of an iterator of lists of batches, which a thread runs ahead.

    What the iterator raises is raised by `next` here, after the batches that came before it.
    """

    def __init__(self, chunks: Iterator[list[Any]], depth: int = DEPTH):
        self._chunks = chunks
        self._ready: queue.Queue[list[Any] | BaseException | None] = queue.Queue(depth)
        self._batches: Iterator[Any] = iter(())
        self._closed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="ftrain-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> Any:
        for batch in self._batches:
            return batch
        if self._ended:
            raise StopIteration
        chunk = self._ready.get()
        if isinstance(chunk, list):
            self._batches = iter(chunk)
            return next(self)
        self._ended = True
        if chunk is None:
            raise StopIteration
        raise chunk

    def close(self) -> None:
        """End the thread; it is gone when this returns, unless a read of the source hangs."""
        self._closed.set()
        self._ended, self._batches = True, iter(())
        self._thread.join(timeout=10)

    def _work(self) -> None:
        try:
            for chunk in self._chunks:
                if not self._put(chunk):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - handed over to the thread that asks for batches
            self._put(error)

    def _put(self, item: list[Any] | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False


def _chunk_size(pipeline: Pipeline) -> int:
    batch = pipeline.batch(0)
    size = sum(array.nbytes for array in batch.values())
    return min(CHUNK_STEPS, max(1, CHUNK_BYTES // max(size, 1)))
