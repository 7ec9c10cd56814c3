"""Executors: run reads inline, in threads or in worker processes, without waiting for hung ones."""

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

_POLL_SECONDS = 0.1  # between two checks of whether to keep waiting
_GRACE_SECONDS = 1.0  # for a thread or a process to end

Work = Callable[[Any], Any]
Result = Callable[[], Any]  # waits for the result of a request; raises what the work raised
_serializer: Any = ForkingPickler  # of connections; its type stub lacks loads
_Reply = tuple[Any, Exception | None, str]  # result, error, traceback of the error


class Executor(Protocol):
    """Runs a function for many requests."""

    def submit(self, request: Any) -> Result:
        """Start the work; calling the returned function waits for the result."""
        ...

    def close(self) -> None:
        """End threads and processes."""
        ...


class Inline:
    """Runs the work in the calling thread, when the result is requested."""

    def __init__(self, work: Work):
        self._work = work

    def submit(self, request: Any) -> Result:
        """Return a function that does the work."""
        return functools.partial(self._work, request)

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


class Threads:
    """Runs the work in `count` threads; waiting ends when `stopped` returns True."""

    def __init__(self, count: int, work: Work, stopped: Callable[[], bool]):
        self._work = work
        self._stopped = stopped
        self._requests: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        # Daemon threads, so that a hung read does not keep the process from exiting.
        self._threads = [
            threading.Thread(target=self._serve, name=f"ftrain-read-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Any) -> Result:
        """Queue the request for the next free thread."""
        future: Future[Any] = Future()
        self._requests.put((request, future))
        return functools.partial(self._wait, future)

    def close(self) -> None:
        """End the threads; after a grace period a hung one keeps running."""
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join(_GRACE_SECONDS)

    def _serve(self) -> None:
        while (taken := self._requests.get()) is not None:
            request, future = taken
            if self._stopped():
                return
            try:
                future.set_result(self._work(request))
            except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
                future.set_exception(error)

    def _wait(self, future: "Future[Any]") -> Any:
        while True:
            concurrent.futures.wait([future], _POLL_SECONDS)
            if future.done():
                return future.result()
            if self._stopped():
                raise EndOfData("reading was stopped")


class WorkerTraceback(Exception):  # noqa: N818 - it only carries a traceback
    """The traceback of an error in a worker process; set as the cause of the error here."""


class Workers:
    """Runs the work in `count` processes, in turn; each gets the function once, when it starts.

    Processes are spawned, because the threads of jax do not survive a fork. They end with their
    parent.
    """

    def __init__(self, count: int, work: Work, stopped: Callable[[], bool], name: str):
        self._next = 0
        self._workers: list[_Worker] = []
        try:
            for _ in range(count):
                self._workers.append(_Worker(work, stopped, name))
        except BaseException:
            self.close()
            raise

    def submit(self, request: Any) -> Result:
        """Send the request to the next process."""
        worker = self._workers[self._next % len(self._workers)]
        self._next += 1
        return worker.submit(request)

    def close(self) -> None:
        """End the processes; a hung one is killed after a grace period."""
        for worker in self._workers:
            worker.disconnect()
        for worker in self._workers:
            worker.end()


class _Worker:
    """One process and the connection to it."""

    def __init__(self, work: Work, stopped: Callable[[], bool], name: str):
        self._stopped = stopped
        self._name = name
        self._sent = 0
        self._received = 0
        self._replies: dict[int, _Reply] = {}  # received, but not requested yet
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, work), name="ftrain-worker", daemon=True
        )
        # The child inherits the signal mask, so Ctrl-C does not reach it before it ignores SIGINT.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - serialization raises errors of many types
            self._connection.close()
            raise TypeError(
                f"{name} cannot be sent to a worker process: {error}; "
                "functions must be importable, so no lambdas"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()  # so that the connection ends with the process

    def submit(self, request: Any) -> Result:
        number = self._sent
        self._sent += 1
        try:
            self._connection.send(request)
        except OSError:
            raise self._died() from None
        return functools.partial(self._wait, number)

    def disconnect(self) -> None:
        self._connection.close()

    def end(self) -> None:
        if self._process.is_alive():
            self._process.join(_GRACE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_GRACE_SECONDS)

    def _wait(self, number: int) -> Any:
        while number not in self._replies:
            self._replies[self._received] = self._receive()
            self._received += 1
        result, error, trace = self._replies.pop(number)
        if error is not None:
            raise error from WorkerTraceback(trace)
        return result

    def _receive(self) -> _Reply:
        try:
            while not self._connection.poll(_POLL_SECONDS):
                if self._stopped():
                    raise EndOfData("reading was stopped")
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        except EndOfData:
            raise
        except Exception as error:  # noqa: BLE001 - it was sent, but cannot be rebuilt here
            message = (
                f"cannot decode the reply of a worker process: {type(error).__name__}: {error}"
            )
            return None, RuntimeError(message), ""

    def _died(self) -> RuntimeError:
        self._process.join(_GRACE_SECONDS)
        code = self._process.exitcode
        return RuntimeError(
            f"a worker process that read from {self._name} died (exit code {code}): it was killed, "
            "perhaps out of memory, or it never started, because the program lacks "
            "if __name__ == '__main__':; workers=0 may show the error"
        )


def _serve(connection: Connection, work: Work) -> None:
    """In a worker process: reply to requests until the parent disconnects."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # accelerators belong to the parent
    # A terminal or a cluster sends these to all processes; the parent handles them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):  # the parent has disconnected or died
            return
        _reply(connection, work, request)


def _end_with_parent() -> None:
    """Exit as soon as the parent dies, even in the middle of a long read."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _reply(connection: Connection, work: Work, request: Any) -> None:
    reply: _Reply
    try:
        reply = work(request), None, ""
    except Exception as error:  # noqa: BLE001 - raised again by the waiting process
        reply = None, _sendable(error), traceback.format_exc()
    try:
        connection.send(reply)
    except OSError:  # the parent has disconnected
        return
    except Exception as error:  # noqa: BLE001 - serialization raises errors of many types
        failure = TypeError(f"the batch cannot be sent to another process: {error}")
        with suppress(OSError):
            connection.send((None, failure, ""))


def _sendable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if it cannot be serialized."""
    try:
        _serializer.loads(_serializer.dumps(error))
    except Exception:  # noqa: BLE001 - any error means that it cannot be sent
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", []):
            substitute.add_note(note)
        return substitute
    return error
