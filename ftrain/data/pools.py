"""Pools: threads, or worker processes, that do what they are asked to; nobody waits for one that hangs."""

import concurrent.futures
import functools
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from ftrain.coordination import EndOfData

_POLL = 0.1  # seconds between two looks at whether to go on waiting
_GRACE = 1.0  # seconds in which a thread or a process may end by itself

Result = Callable[[], Any]


class Pool(Protocol):
    def submit(self, order: Any) -> Result:
        """Have it done; what is answered waits for the result, and raises what went wrong."""
        ...

    def close(self) -> None: ...


class AtOnce:
    """No pool: whoever asks does it."""

    def __init__(self, work: Callable[[Any], Any]):
        self._work = work

    def submit(self, order: Any) -> Result:
        return functools.partial(self._work, order)

    def close(self) -> None:
        pass


class Threads:
    """Threads that call `work`; `stopped` tells a wait to end."""

    def __init__(self, count: int, work: Callable[[Any], Any], stopped: Callable[[], bool]):
        self._work, self._stopped = work, stopped
        self._orders: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        # Daemons: one that hangs must not keep the process from ending.
        names = [f"ftrain-read-{number}" for number in range(count)]
        self._threads = [
            threading.Thread(target=self._serve, name=name, daemon=True) for name in names
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, order: Any) -> Result:
        future: Future[Any] = Future()
        self._orders.put((order, future))
        return functools.partial(self._wait, future)

    def close(self) -> None:
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join(_GRACE)

    def _serve(self) -> None:
        while (taken := self._orders.get()) is not None:
            order, future = taken
            if self._stopped():
                return
            try:
                future.set_result(self._work(order))
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the result
                future.set_exception(error)

    def _wait(self, future: "Future[Any]") -> Any:
        while True:
            concurrent.futures.wait([future], _POLL)
            if future.done():
                return future.result()
            if self._stopped():
                raise EndOfData("the data are no longer wanted")


class WorkerTraceback(Exception):  # noqa: N818 - it tells of an error
    """Where in a worker process an error was raised; the cause of that error here."""


class Workers:
    """Processes that call `work`, which is sent to each of them once; orders take turns.

    They are started anew, since what jax runs in threads does not survive a fork, and end with their parent.
    """

    def __init__(
        self, count: int, work: Callable[[Any], Any], stopped: Callable[[], bool], name: str
    ):
        self._next = 0
        self._workers: list[_Worker] = []
        try:
            for _ in range(count):
                self._workers.append(_Worker(work, stopped, name))
        except BaseException:
            self.close()
            raise

    def submit(self, order: Any) -> Result:
        worker = self._workers[self._next % len(self._workers)]
        self._next += 1
        return worker.submit(order)

    def close(self) -> None:
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.end()


class _Worker:
    def __init__(self, work: Callable[[Any], Any], stopped: Callable[[], bool], name: str):
        self._stopped, self._name = stopped, name
        self._sent, self._received = 0, 0
        self._answers: dict[
            int, tuple[Any, Exception | None, str]
        ] = {}  # that nobody has asked for yet
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, work), name="ftrain-worker", daemon=True
        )
        # Until it ignores Ctrl-C by itself, it must not be told of it; what is blocked here is so there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - of many kinds, and none of its own
            self._line.close()
            raise TypeError(
                f"{name} cannot be sent to a worker process: {error}; functions must be importable, and no lambdas"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()  # so that the end of the process is the end of the line

    def submit(self, order: Any) -> Result:
        number, self._sent = self._sent, self._sent + 1
        try:
            self._line.send(order)
        except OSError:
            raise self._gone() from None
        return functools.partial(self._wait, number)

    def hang_up(self) -> None:
        self._line.close()

    def end(self) -> None:
        if self._process.is_alive():
            self._process.join(_GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_GRACE)

    def _wait(self, number: int) -> Any:
        while number not in self._answers:
            self._answers[self._received] = self._receive()
            self._received += 1
        made, error, trace = self._answers.pop(number)
        if error is not None:
            raise error from WorkerTraceback(trace)
        return made

    def _receive(self) -> Any:
        try:
            while not self._line.poll(_POLL):
                if self._stopped():
                    raise EndOfData("the data are no longer wanted")
            return self._line.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        except EndOfData:
            raise
        except Exception as error:  # noqa: BLE001 - it was sent, but cannot be made here
            return (
                None,
                RuntimeError(
                    f"what a worker process sent cannot be read: {type(error).__name__}: {error}"
                ),
                "",
            )

    def _gone(self) -> RuntimeError:
        self._process.join(_GRACE)
        code = self._process.exitcode
        return RuntimeError(
            f"a worker process that read from {self._name} is gone (exit code {code}): it was killed, perhaps for want "
            "of memory; or it never started, as in a program whose work does not stand under "
            "if __name__ == '__main__':; workers=0 shows more"
        )


def _serve(line: Connection, work: Callable[[Any], Any]) -> None:
    """In a worker process: answer orders until the line ends. Devices and Ctrl-C are its parent's."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal, or a cluster, sends them to all
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            order = line.recv()
        except (EOFError, OSError):  # its parent has hung up, or is gone
            return
        _answer(line, work, order)


def _end_with_parent() -> None:
    """A read may take long, and nobody would wait for it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(line: Connection, work: Callable[[Any], Any], order: Any) -> None:
    try:
        answer = work(order), None, ""
    except Exception as error:  # noqa: BLE001 - raised by whoever waits for the answer
        answer = None, _sendable(error), traceback.format_exc()
    try:
        line.send(answer)
    except OSError:  # nobody waits any more
        return
    except Exception as error:  # noqa: BLE001 - some answers cannot be sent
        with suppress(OSError):
            line.send(
                (None, TypeError(f"what was read cannot be sent to another process: {error}"), "")
            )


def _sendable(error: Exception) -> Exception:
    """The error, or one that says the same, if it would not arrive."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))  # pyright: ignore[reportAttributeAccessIssue] - a wrong stub
    except Exception:  # noqa: BLE001 - whatever it is
        told = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", []):
            told.add_note(note)
        return told
    return error
