"""Read-ahead: the batches of a pipeline, read by threads or worker processes, yielded in order."""

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ftrain.data.executors import Executor, Inline, Result, Threads, Workers
from ftrain.data.pipeline import Pipeline
from ftrain.data.source import Batch, describe, size_of

CHUNK_BYTES = 1 << 20  # small batches are read several at a time, up to this many bytes
CHUNK_STEPS = 64  # and this many steps
CHUNK_SECONDS = 0.02  # and this time


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


def read_steps(
    pipeline: Pipeline, step: int, lengths: Iterator[int], stopped: Callable[[], bool]
) -> Iterator[ReadResult]:
    """Read ahead from `step` on, for calls that take the given numbers of steps.

    The steps of a call are read together, and several single steps: few large reads are cheaper.
    """
    chunk = _Chunk()
    for result in read_ahead(pipeline, _requests(pipeline, step, lengths, chunk), stopped):
        chunk.adapt(result)
        yield result


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


def _requests(
    pipeline: Pipeline, step: int, lengths: Iterator[int], chunk: "_Chunk"
) -> Iterator[ReadRequest]:
    """Yield the reads for calls of the given lengths, up to the end of the data."""
    for length, run in itertools.groupby(lengths):
        while calls := len(list(itertools.islice(run, chunk.steps if length == 1 else 1))):
            count = calls * length
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
