"""Read-ahead: the batches of a pipeline, read by threads or worker processes, yielded in order."""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ftrain.data.executors import Executor, Inline, Result, Threads, Workers
from ftrain.data.pipeline import Pipeline
from ftrain.data.source import Batch, describe


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read the batches of `count` steps; `stacked` asks for one array if they have one shape."""

    step: int
    count: int
    stacked: bool


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The batches of a request, one stacked or `request.count` single ones, and the time taken."""

    request: ReadRequest
    batches: list[Batch]
    is_stacked: bool
    seconds: float


def read(pipeline: Pipeline, request: ReadRequest) -> ReadResult:
    """Read the batches of one request."""
    start = time.perf_counter()
    is_stacked = request.stacked and pipeline.is_uniform
    batches = (
        [pipeline.batches(request.step, request.count)]
        if is_stacked
        else pipeline.split(request.step, request.count)
    )
    return ReadResult(request, batches, is_stacked, time.perf_counter() - start)


def read_ahead(
    pipeline: Pipeline, requests: Iterator[ReadRequest], stopped: Callable[[], bool]
) -> Iterator[ReadResult]:
    """Yield the result of each request in order, until `stopped`.

    Up to one request more than there are threads or workers is in flight.
    """
    ahead = pipeline.workers or (pipeline.threads if pipeline.threads > 1 else 0)
    in_flight: deque[tuple[ReadRequest, Result]] = deque()
    executor = _start(pipeline, stopped)
    try:
        for request in requests:
            in_flight.append((request, executor.submit(request)))
            if len(in_flight) > ahead:
                yield from _finish(*in_flight.popleft(), executor)
        while in_flight:
            yield from _finish(*in_flight.popleft(), executor)
    finally:
        executor.close()


def _start(pipeline: Pipeline, stopped: Callable[[], bool]) -> Executor:
    work = functools.partial(read, pipeline)
    if pipeline.workers:
        return Workers(pipeline.workers, work, stopped, describe(pipeline.source))
    if pipeline.threads > 1:
        return Threads(pipeline.threads, work, stopped)
    return Inline(work)  # the caller already runs in a background thread


def _finish(request: ReadRequest, result: Result, executor: Executor) -> Iterator[ReadResult]:
    try:
        finished = result()
    except Exception:
        if request.count == 1:
            raise
        # Read the steps one by one: batches before the failure are good, and the error then names
        # its own step.
        for step in range(request.step, request.step + request.count):
            yield executor.submit(ReadRequest(step, 1, stacked=False))()
    else:
        yield finished
