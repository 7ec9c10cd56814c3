"""Coordination: threads that stop together, and whose exceptions reach the thread that joins them.

coordinator = Coordinator()
LooperThread(coordinator, target=refill).start()
...
coordinator.request_stop()
coordinator.join()  # raises what a thread raised
"""

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

_POLL = 0.02  # seconds; nothing can wait for a thread's end and for an event at once


class EndOfData(Exception):  # noqa: N818 - nothing went wrong
    """There are no more data: a run, or the threads of a coordinator, end without an error."""


class Coordinator:
    """Stops several threads together. Any thread may request it.

    The first exception reported by `request_stop` or `stop_on_exception` is raised by `join`. One
    of the `clean_stop_exception_types` stops the threads too, but is not raised.
    """

    def __init__(self, clean_stop_exception_types: tuple[type[BaseException], ...] = (EndOfData,)):
        self._clean = clean_stop_exception_types
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._exception: BaseException | None = None
        self._threads: set[threading.Thread] = set()
        self.joined = False

    def register_thread(self, thread: threading.Thread) -> None:
        """Make `join` wait for this thread too."""
        with self._lock:
            self._threads.add(thread)

    def should_stop(self) -> bool:
        """Return True once a stop was requested."""
        return self._stop.is_set()

    def request_stop(self, error: BaseException | tuple[Any, ...] | None = None) -> None:
        """Request that all threads stop. Only the first request counts.

        `error` is an exception, or the tuple that `sys.exc_info()` returns. After `join` it is
        raised at once.
        """
        exception = error[1] if isinstance(error, tuple) else error
        with self._lock:
            failure = None if isinstance(exception, self._clean) else exception
            if self.joined and failure is not None:
                raise failure
            if not self._stop.is_set():
                self._exception = failure
                self._stop.set()

    def clear_stop(self) -> None:
        """Clear the request, so that the coordinator can be used again."""
        with self._lock:
            self.joined = False
            self._exception = None
            self._stop.clear()

    @contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Request a stop with any exception of the block, instead of raising it here."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised by the thread that joins
            self.request_stop(error)

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is requested; return False if `timeout` seconds pass first."""
        return self._stop.wait(timeout)

    def raise_requested_exception(self) -> None:
        """Raise the exception that a stop was requested with, if any."""
        with self._lock:
            exception = self._exception
        if exception is not None:
            raise exception

    def join(
        self,
        threads: Iterable[threading.Thread] | None = None,
        *,
        stop_grace_period_secs: float = 120.0,
        ignore_live_threads: bool = False,
    ) -> None:
        """Wait for all threads to end, at most `stop_grace_period_secs` after a stop was requested.

        Raise the exception of the first thread that failed. Raise RuntimeError if threads are
        still alive, unless `ignore_live_threads`.
        """
        with self._lock:
            joined = self._threads.union(threads or ())
        while any(thread.is_alive() for thread in joined) and not self.wait_for_stop(_POLL):
            pass
        deadline = time.monotonic() + stop_grace_period_secs
        for thread in joined:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self.joined = True
            self._threads = set()
        self.raise_requested_exception()
        alive = sorted(thread.name for thread in joined if thread.is_alive())
        if alive and not ignore_live_threads:
            raise RuntimeError(
                f"threads still running {stop_grace_period_secs:g} s after the stop request: "
                f"{', '.join(alive)}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.request_stop()
        try:
            self.join()
        except BaseException as failure:
            if error is None:
                raise
            error.add_note(f"a thread failed too: {failure!r}")


class LooperThread(threading.Thread):
    """Calls `run_loop`, which calls `target`, repeatedly until its coordinator stops.

    With `timer_interval_secs`, the calls start at these intervals. An exception in one of them
    stops the coordinator.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        timer_interval_secs: float | None = None,
        *,
        target: Callable[..., object] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name, daemon=True)
        self._coordinator = coordinator
        self._interval = timer_interval_secs
        self._call = None if target is None else functools.partial(target, *args, **(kwargs or {}))
        coordinator.register_thread(self)

    @classmethod
    def loop(
        cls,
        coordinator: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Self:
        """Start a thread that calls `target` until the coordinator stops."""
        thread = cls(coordinator, timer_interval_secs, target=target, args=args, kwargs=kwargs)
        thread.start()
        return thread

    def run(self) -> None:
        """Run the loop; the thread calls this when it is started."""
        with self._coordinator.stop_on_exception():
            self.start_loop()
            due = time.monotonic()
            while not self._coordinator.wait_for_stop(max(0.0, due - time.monotonic())):
                self.run_loop()
                due = time.monotonic() if self._interval is None else due + self._interval
            self.stop_loop()

    def start_loop(self) -> None:
        """Called once, before the first `run_loop`."""

    def run_loop(self) -> None:
        """Called repeatedly; calls `target`. A subclass may override it."""
        if self._call is not None:
            self._call()

    def stop_loop(self) -> None:
        """Called once, after the last `run_loop`, unless one failed."""


def call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Call every function, even if some raise; then raise the first exception."""
    failures: list[BaseException] = []
    for function in functions:
        try:
            function()
        except BaseException as failure:  # noqa: BLE001 - raised below
            failures.append(failure)
    if failures:
        for later in failures[1:]:
            failures[0].add_note(f"then this failed too: {later!r}")
        raise failures[0]
