"""Background writer: a thread writes, so that the run does not wait for files."""

import queue
from collections.abc import Mapping, Sequence
from typing import Protocol

from ftrain.coordination import Coordinator, LooperThread

MAX_PENDING = 1000  # writes; with more, the run blocks


class Writer(Protocol):
    """What a `BackgroundWriter` writes to: a `SummaryWriter`, a `MetricsFile`."""

    def write(self, step: int, values: Mapping[str, float | str]) -> None: ...
    def close(self) -> None: ...


class BackgroundWriter:
    """Passes writes to `writers`, in order, in a thread. An error in one stops the coordinator."""

    def __init__(self, writers: Sequence[Writer], coordinator: Coordinator):
        self._writers = writers
        self._outer = coordinator
        self._error: BaseException | None = None
        self._pending: queue.Queue[tuple[int, Mapping[str, float | str]] | None] = queue.Queue(
            MAX_PENDING
        )
        self._own = Coordinator()  # stops only this thread, after the last write
        LooperThread(self._own, target=self._work, name="ftrain-writer").start()

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Queue a write; raise the error of an earlier one, if any."""
        self._raise_error()
        self._pending.put((step, dict(values)))

    def flush(self) -> None:
        """Block until all pending writes are done."""
        self._pending.join()
        self._raise_error()

    def close(self) -> None:
        """Finish the pending writes, stop the thread and close the writers."""
        self._pending.put(None)
        self._pending.join()
        self._own.join()
        for writer in self._writers:
            writer.close()
        self._raise_error()

    def _work(self) -> None:
        item = self._pending.get()
        try:
            if item is None:
                self._own.request_stop()
            elif self._error is None:
                for writer in self._writers:
                    writer.write(*item)
        except BaseException as error:  # noqa: BLE001 - raised in the run
            self._error = error
            self._outer.request_stop(error)
        finally:
            self._pending.task_done()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
