"""The writing side of a manager: one save at a time, behind the caller's back, and one writer to a directory."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, TypeVar

import jax

from ftrain.checkpoints import keeping, writing
from ftrain.checkpoints.catalog import committed, numbered, path_of, read_catalog
from ftrain.checkpoints.errors import CheckpointError, SaveError, in_one_line
from ftrain.checkpoints.lock import wait_for
from ftrain.checkpoints.retention import Record, Retention
from ftrain.checkpoints.snapshot import as_given, take
from ftrain.storage import raise_if_transient, retry
from ftrain.tree import Tree

LOCK = ".writer.lock"  # held by whoever writes a checkpoint, while it does

T = TypeVar("T")


class Writer:
    """Writes checkpoints to a directory, and lets go of those that need not stay."""

    def __init__(
        self, retention: Retention, may_be_infinite: tuple[str, ...], clock: Callable[[], float]
    ):
        self._directory = Path()  # known once it is written to
        self._retention, self._may_be_infinite = retention, may_be_infinite
        self._clock, self._opened = clock, clock()
        self._unfinished: Future[list[str]] | None = None
        self._swept: int | None = None  # the directory, once it was put in order

    def start(
        self,
        directory: Path,
        step: int,
        tree: Tree,
        metrics: Mapping[str, float],
        extra: dict[str, Any] | None,
        *,
        overwrite: bool,
        damaged: set[int],
    ) -> None:
        """Start to write; what is `damaged` is put aside first, or it would count as one of the newest."""
        self._directory = directory
        measured = finite(metrics)
        held = take(tree)
        lock = None
        try:
            lock = retry(self._lock_directory) if jax.process_index() == 0 else None
            retry(lambda: self._make_room(step, overwrite, damaged))
            times = [record.time for record in retry(lambda: read_catalog(self._directory).records)]
            now = max([self._clock(), *times])  # clocks are put back at times
            order = writing.Order(
                self._directory, step, held, now, measured, self._may_be_infinite, extra
            )
            if (
                jax.process_count() > 1
            ):  # only the thread that runs the steps may call what processes do together
                order = dataclasses.replace(
                    order, begun=writing.begin(order.staged, as_given(tree))
                )
        except BaseException as error:
            if lock is not None:
                lock.close()
            if isinstance(error, OSError):
                raise self._failure(step, error) from error
            raise
        self._unfinished = _in_background(lambda: self._finish(order, lock))

    def complete(
        self, directory: Path, step: int, metrics: Mapping[str, float], extra: dict[str, Any] | None
    ) -> None:
        """Add to what is known of a checkpoint that is written. Of several processes the first one does it."""
        if jax.process_index() == 0:
            try:
                keeping.complete(
                    directory, step, finite(metrics), extra or {}, self._retention, self._opened
                )
            except OSError as error:
                path = path_of(directory, step)
                raise SaveError(
                    f"the metrics of {path} were not completed: {in_one_line(error)}"
                ) from error

    def wait(self) -> list[str]:
        """Wait for the save that is under way; the answer is what there is to tell of it."""
        if self._unfinished is None:
            return []
        future = self._unfinished
        wait([future])  # an interrupt here leaves everything as it is
        self._unfinished = None
        return future.result()

    def _finish(self, order: writing.Order, lock: IO[str] | None) -> list[str]:
        """In a thread: write, and let go of what is no longer to be kept; the answer is what there is to tell."""
        try:
            suspicious = self._write(order)
        except Exception as error:
            writing.abandon(order)
            raise self._failure(order.step, error) from error
        else:
            return [*self._suspicion(order.step, suspicious), *self._keep(order, bool(suspicious))]
        finally:
            if lock is not None:
                lock.close()

    def _write(self, order: writing.Order) -> list[str]:
        """Write; after a transient error once more from the start, unless several processes are at it together."""
        if order.begun is not None:
            return writing.write(order)

        def attempt() -> list[str]:
            try:
                return writing.write(order)
            except Exception as error:
                raise_if_transient(error, order.staged)
                raise

        return retry(attempt, before_retry=lambda: writing.abandon(order))

    def _keep(self, order: writing.Order, is_suspect: bool) -> list[str]:
        """Enter a checkpoint into the catalog. It is written, so what goes wrong from here on is only told."""
        try:
            if jax.process_index() == 0 and is_suspect:
                retry(lambda: keeping.let_go_of_suspects(self._directory, self._retention.keep))
            elif jax.process_index() == 0:
                record = Record(order.step, order.time, order.metrics)
                retry(lambda: keeping.enter(self._directory, record, self._retention, self._opened))
        except OSError as error:
            path = path_of(self._directory, order.step)
            return [
                f"{path} was saved, but the catalog or an older one could not be changed: {error}"
            ]
        return []

    def _suspicion(self, step: int, leaves: list[str]) -> list[str]:
        if not leaves:
            return []
        named = ", ".join(leaves[:3]) + (", ..." if len(leaves) > 3 else "")
        path = self._directory / f"{step}{writing.SUSPECT}"
        why = "it was put aside and is not the latest (may_be_infinite names leaves that may be so)"
        return [f"{path}: not finite: {named}; {why}"]

    def _failure(self, step: int, error: Exception) -> SaveError:
        reason = in_one_line(error) if self._is_there() else f"{self._directory} is no longer there"
        try:
            kept = f"checkpoints that are still there: {', '.join(map(str, committed(self._directory))) or 'none'}"
        except OSError as failure:
            kept = f"which checkpoints are still there cannot be listed: {failure.strerror}"
        return SaveError(f"{self._directory / str(step)} was not saved: {reason}; {kept}")

    def _lock_directory(self) -> IO[str]:
        """The lock of who writes here, as soon as nobody else does."""
        if self._swept is None:
            self._directory.mkdir(parents=True, exist_ok=True)
        if not self._is_there():  # Orbax would make it anew, and nobody would know what was lost
            raise FileNotFoundError(f"{self._directory} is no longer there")
        return wait_for(self._directory / LOCK)

    def _make_room(self, step: int, overwrite: bool, damaged: set[int]) -> None:
        """See to it that nothing stands where the checkpoint is to be."""
        if jax.process_index() == 0:
            self._put_in_order(step, damaged)
        if step in committed(self._directory) and not overwrite:
            raise CheckpointError(
                f"{path_of(self._directory, step)} exists already; overwrite=True would replace it"
            )

    def _put_in_order(self, step: int, damaged: set[int]) -> None:
        if self._swept is None:
            writing.sweep(self._directory)
            self._swept = self._directory.stat().st_ino
        for each in damaged & {*numbered(self._directory)}:
            writing.put_aside(path_of(self._directory, each), writing.DAMAGED)
        if os.path.lexists(path_of(self._directory, step)) and step not in committed(
            self._directory
        ):
            writing.put_aside(path_of(self._directory, step), writing.INCOMPLETE)

    def _is_there(self) -> bool:
        """Whether the directory is still the one that was put in order."""
        try:
            return self._swept in (None, self._directory.stat().st_ino)
        except FileNotFoundError:
            return self._swept is None
        except OSError:  # it cannot be asked now, which does not make it another directory
            return True


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a checkpoint can be compared by."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _in_background(work: Callable[[], T]) -> Future[T]:
    """Work in a thread of its own, which ends with it; the program does not end before it."""

    def begin() -> T:
        time.sleep(0.001)  # or the caller would wait for its turn, 5 ms each time, to leave here
        return work()

    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = thread.submit(begin)
    thread.shutdown(wait=False)
    return future
