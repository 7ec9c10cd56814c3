"""Writing in the background: a thread writes, so that the run does not wait for files."""

import queue
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from ftrain.coordination import Coordinator, LooperThread

MAX_PENDING = 1000  # writes; with more, the run waits
_POLL = 0.001  # seconds


class Writer(Protocol):
    """Writes the values of a step."""

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write the values of a step."""
        ...

    def close(self) -> None:
        """Complete the file."""
        ...


class _Mark:
    """An item of the queue that is passed once everything before it is written."""

    is_passed = False


class BackgroundWriter:
    """Writes to `writers`, in order, in a thread. An exception in one of them stops `coordinator`.

    Ctrl-C raises KeyboardInterrupt anywhere in the main thread. Inside of a `queue.Queue` or a
    `threading.Condition` it can leave a lock held or a waiting thread without its notification, and
    closing would then wait forever. So the main thread only uses a `SimpleQueue`, whose operations
    are atomic, and polls a flag.
    """

    def __init__(self, writers: Sequence[Writer], coordinator: Coordinator):
        self._writers = writers
        self._outer = coordinator
        self._error: BaseException | None = None
        self._pending: queue.SimpleQueue[tuple[int, Mapping[str, float | str]] | _Mark | None] = (
            queue.SimpleQueue()
        )
        self._own = Coordinator()  # ends this thread alone, when everything is written
        LooperThread(self._own, target=self._work, name="ftrain-writer").start()

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Queue values for writing; wait if too many writes are pending."""
        self._raise_error()
        while self._pending.qsize() >= MAX_PENDING:
            time.sleep(_POLL)
        self._pending.put((step, dict(values)))

    def flush(self) -> None:
        """Wait until everything is written."""
        mark = _Mark()
        self._pending.put(mark)
        while not mark.is_passed and not self._own.should_stop():
            time.sleep(_POLL)
        self._raise_error()

    def close(self) -> None:
        """Finish pending writes, end the thread, and close the writers."""
        self._pending.put(None)
        self._own.join()
        for writer in self._writers:
            writer.close()
        self._raise_error()

    def _work(self) -> None:
        item = self._pending.get()
        try:
            if item is None:
                self._own.request_stop()
            elif isinstance(item, _Mark):
                item.is_passed = True
            elif self._error is None:
                for writer in self._writers:
                    writer.write(*item)
        except BaseException as error:  # noqa: BLE001 - raised in the run, which drops other writes
            self._error = error
            self._outer.request_stop(error)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
