"""Reading ahead: the batches of a pipeline, read by threads or by worker processes, and handed over in order."""

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass

from ftrain.data.pipeline import Pipeline
from ftrain.data.source import Batch, describe


@dataclass(frozen=True, slots=True)
class Read:
    """The batches of `count` steps: stacked to one, if that was asked for and they have one form, or one by one."""

    step: int
    count: int
    stacked: bool


@dataclass(frozen=True, slots=True)
class Done:
    """One stacked batch, or `order.count` of them, and how long it took to read them."""

    order: Read
    batches: list[Batch]
    seconds: float


_Submit = Callable[[Read], "Future[Done]"]


def read(pipeline: Pipeline, order: Read) -> Done:
    start = time.perf_counter()
    if order.stacked and pipeline.is_uniform:
        batches = [pipeline.batches(order.step, order.count)]
    else:
        batches = pipeline.split(order.step, order.count)
    return Done(order, batches, time.perf_counter() - start)


def read_ahead(pipeline: Pipeline, orders: Iterator[Read]) -> Iterator[Done]:
    """What was read for each order. As many are under way as there are threads or workers, and one more."""
    ahead = pipeline.workers or (pipeline.threads if pipeline.threads > 1 else 0)
    under_way: deque[tuple[Read, Future[Done]]] = deque()
    with _started(pipeline) as submit:
        for order in orders:
            under_way.append((order, submit(order)))
            if len(under_way) > ahead:
                yield from _finish(pipeline, *under_way.popleft(), submit)
        while under_way:
            yield from _finish(pipeline, *under_way.popleft(), submit)


def _finish(pipeline: Pipeline, order: Read, future: "Future[Done]", submit: _Submit) -> Iterator[Done]:
    try:
        yield future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"a worker process that read from {describe(pipeline.source)} is gone: it was killed, perhaps for want of "
            "memory, or never started, as in a program whose work does not stand under if __name__ == '__main__', or "
            "raised what cannot be sent; workers=0 shows"
        ) from None
    except Exception:
        if order.count == 1:
            raise
        # Read again one by one: the batches before the failure are good, and it is told with its own step.
        for single in (Read(step, 1, stacked=False) for step in range(order.step, order.step + order.count)):
            yield submit(single).result()


@contextmanager
def _started(pipeline: Pipeline) -> Iterator[_Submit]:
    """What lets an order be read, by threads or workers that end with the block, or at once."""
    if pipeline.workers:
        # Started anew: what jax runs in threads does not survive a fork.
        context = multiprocessing.get_context("spawn")
        executor, call = ProcessPoolExecutor(pipeline.workers, context, _begin, (pipeline,)), _read_here
    elif pipeline.threads > 1:
        executor, call = ThreadPoolExecutor(pipeline.threads, "ftrain-read"), functools.partial(read, pipeline)
    else:  # whoever asks is a thread of its own already
        yield functools.partial(_read_at_once, pipeline)
        return
    try:
        yield functools.partial(executor.submit, call)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _read_at_once(pipeline: Pipeline, order: Read) -> "Future[Done]":
    future: Future[Done] = Future()
    try:
        future.set_result(read(pipeline, order))
    except Exception as error:  # noqa: BLE001 - raised by whoever asks for the result
        future.set_exception(error)
    return future


_here: list[Pipeline] = []  # in a worker process, its copy of the pipeline


def _begin(pipeline: Pipeline) -> None:
    """In a worker process: wait for steps to read. Devices, Ctrl-C and the end are its parent's."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _here.append(pipeline)


def _read_here(order: Read) -> Done:
    return read(_here[0], order)
