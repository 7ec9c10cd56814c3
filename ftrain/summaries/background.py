"""Writing behind a run's back: a thread does it, so that the run need not wait for files."""

import queue
from collections.abc import Mapping, Sequence
from typing import Protocol

from ftrain.coordination import Coordinator, LooperThread

WAITING = 1000  # writes that wait; then the run waits too


class Writer(Protocol):
    def write(self, step: int, values: Mapping[str, float | str]) -> None: ...
    def close(self) -> None: ...


class BackgroundWriter:
    """Hands what is written to `writers`, in order, from a thread. What one of them raises stops the coordinator."""

    def __init__(self, writers: Sequence[Writer], coordinator: Coordinator):
        self._writers, self._outer = writers, coordinator
        self._error: BaseException | None = None
        self._waiting: queue.Queue[tuple[int, Mapping[str, float | str]] | None] = queue.Queue(
            WAITING
        )
        self._own = Coordinator()  # ends this thread alone, when all is written
        LooperThread(self._own, target=self._work, name="ftrain-writer").start()

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Have this written soon."""
        self._raise_error()
        self._waiting.put((step, dict(values)))

    def flush(self) -> None:
        """Wait until all is written."""
        self._waiting.join()
        self._raise_error()

    def close(self) -> None:
        """Write what waits, end the thread, and close the writers."""
        self._waiting.put(None)
        self._waiting.join()
        self._own.join()
        for writer in self._writers:
            writer.close()
        self._raise_error()

    def _work(self) -> None:
        item = self._waiting.get()
        try:
            if item is None:
                self._own.request_stop()
            elif self._error is None:
                for writer in self._writers:
                    writer.write(*item)
        except BaseException as error:  # noqa: BLE001 - handed over to the run; what still waits is passed over
            self._error = error
            self._outer.request_stop(error)
        finally:
            self._waiting.task_done()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
