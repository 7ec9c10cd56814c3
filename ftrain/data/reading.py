"""Reading ahead: the batches of a pipeline, read by threads or by worker processes, and handed over in order."""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ftrain.data.pipeline import Pipeline
from ftrain.data.pools import AtOnce, Pool, Result, Threads, Workers
from ftrain.data.source import Batch, describe


@dataclass(frozen=True, slots=True)
class Read:
    """The batches of `count` steps: stacked to one, if that is asked for and they have one form, or one by one."""

    step: int
    count: int
    stacked: bool


@dataclass(frozen=True, slots=True)
class Done:
    """What was read for an order: one stacked batch, or `order.count` of them; and how long it took."""

    order: Read
    batches: list[Batch]
    is_stacked: bool
    seconds: float


def read(pipeline: Pipeline, order: Read) -> Done:
    start = time.perf_counter()
    is_stacked = order.stacked and pipeline.is_uniform
    batches = (
        [pipeline.batches(order.step, order.count)]
        if is_stacked
        else pipeline.split(order.step, order.count)
    )
    return Done(order, batches, is_stacked, time.perf_counter() - start)


def read_ahead(
    pipeline: Pipeline, orders: Iterator[Read], stopped: Callable[[], bool]
) -> Iterator[Done]:
    """What was read for each order, until `stopped`; one more is begun than there are threads or workers."""
    ahead = pipeline.workers or (pipeline.threads if pipeline.threads > 1 else 0)
    under_way: deque[tuple[Read, Result]] = deque()
    pool = _start(pipeline, stopped)
    try:
        for order in orders:
            under_way.append((order, pool.submit(order)))
            if len(under_way) > ahead:
                yield from _finish(*under_way.popleft(), pool)
        while under_way:
            yield from _finish(*under_way.popleft(), pool)
    finally:
        pool.close()


def _start(pipeline: Pipeline, stopped: Callable[[], bool]) -> Pool:
    work = functools.partial(read, pipeline)
    if pipeline.workers:
        return Workers(pipeline.workers, work, stopped, describe(pipeline.source))
    if pipeline.threads > 1:
        return Threads(pipeline.threads, work, stopped)
    return AtOnce(work)  # whoever asks is a thread of its own already


def _finish(order: Read, result: Result, pool: Pool) -> Iterator[Done]:
    try:
        done = result()
    except Exception:
        if order.count == 1:
            raise
        # Read again one by one: the batches before the failure are good, and it is told with its own step.
        for step in range(order.step, order.step + order.count):
            yield pool.submit(Read(step, 1, stacked=False))()
    else:
        yield done
