"""Coordination: threads that stop together, and whose exceptions reach the one who waits for them.

coordinator = Coordinator()
LooperThread(coordinator, target=refill).start()
...
coordinator.request_stop()
coordinator.join()  # raises what a thread raised
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

_POLL = 0.02  # seconds; nothing can wait for a thread's end and for an event at once


class EndOfData(Exception):  # noqa: N818 - nothing went wrong
    """There are no more data. Ends a run, or the threads of a coordinator, cleanly."""


class Coordinator:
    """Ends several threads together. Any of them may ask for it; the first exception handed in is raised by `join`.

    An exception of `clean_stop_exception_types` ends the threads too, and is not raised.
    """

    def __init__(self, clean_stop_exception_types: tuple[type[BaseException], ...] = (EndOfData,)):
        self._clean = clean_stop_exception_types
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._exception: BaseException | None = None
        self._threads: set[threading.Thread] = set()
        self.joined = False

    def register_thread(self, thread: threading.Thread) -> None:
        """Let `join` wait for this thread too."""
        with self._lock:
            self._threads.add(thread)

    def should_stop(self) -> bool:
        return self._stop.is_set()

    def request_stop(self, error: BaseException | tuple[Any, ...] | None = None) -> None:
        """Ask all threads to stop. Only the first request counts; after `join` an exception is raised at once.

        `error` is an exception, or what `sys.exc_info()` answers.
        """
        exception = error[1] if isinstance(error, tuple) else error
        with self._lock:
            harmful = None if isinstance(exception, self._clean) else exception
            if self.joined and harmful is not None:
                raise harmful
            if not self._stop.is_set():
                self._exception = harmful
                self._stop.set()

    def clear_stop(self) -> None:
        """Forget the request, so that the coordinator can serve again."""
        with self._lock:
            self.joined, self._exception = False, None
            self._stop.clear()

    @contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """Hand in whatever the block raises, instead of raising it."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - handed over to the thread that joins
            self.request_stop(error)

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is asked for; False if `timeout` seconds pass first."""
        return self._stop.wait(timeout)

    def raise_requested_exception(self) -> None:
        """Raise what a thread handed in, if any did."""
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
        """Wait until all threads have ended, at most `stop_grace_period_secs` after a stop was asked for.

        Raises what a thread handed in, or RuntimeError if some are still alive and that is not to be ignored.
        """
        with self._lock:
            waited_for = self._threads.union(threads or ())
        while any(thread.is_alive() for thread in waited_for) and not self.wait_for_stop(_POLL):
            pass
        deadline = time.monotonic() + stop_grace_period_secs
        for thread in waited_for:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self.joined = True
            self._threads = set()
        self.raise_requested_exception()
        alive = sorted(thread.name for thread in waited_for if thread.is_alive())
        if alive and not ignore_live_threads:
            raise RuntimeError(
                f"threads still run {stop_grace_period_secs:g} s after they were asked to stop: {', '.join(alive)}"
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
    """Calls `run_loop`, or `target`, again and again until its coordinator stops.

    With `timer_interval_secs` it is called at those intervals. What it raises stops the coordinator.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        timer_interval_secs: float | None = None,
        *,
        target: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name, daemon=True)
        self._coordinator, self._interval = coordinator, timer_interval_secs
        self._call = target, args, dict(kwargs or {})
        coordinator.register_thread(self)

    @classmethod
    def loop(
        cls,
        coordinator: Coordinator,
        timer_interval_secs: float | None,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Self:
        """Start a thread that calls `target` until the coordinator stops."""
        thread = cls(coordinator, timer_interval_secs, target=target, args=args, kwargs=kwargs)
        thread.start()
        return thread

    def run(self) -> None:
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
        """What is done again and again."""
        target, args, kwargs = self._call
        if target is not None:
            target(*args, **kwargs)

    def stop_loop(self) -> None:
        """Called once, after the last `run_loop`, unless one failed."""


def call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Call each of them, whatever the others raise; the first failure is raised when all have been called."""
    failures: list[BaseException] = []
    for function in functions:
        try:
            function()
        except BaseException as failure:  # noqa: BLE001 - raised below, when all have been called
            failures.append(failure)
    if failures:
        for further in failures[1:]:
            failures[0].add_note(f"then this failed too: {further!r}")
        raise failures[0]
