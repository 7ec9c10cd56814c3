"""The writer of a manager: one save at a time, in the background, and one writer to a directory.

Orbax writes a checkpoint as `STEP.saving`, then the manifest is added, and the directory gets its
final name. So a checkpoint is either complete or missing.
"""

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any, TypeVar

import jax
import numpy as np

from ftrain.checkpoints import catalog, multihost
from ftrain.checkpoints.catalog import (
    REPLACED,
    SAVING,
    SUSPECT,
    Record,
    Retention,
    committed_steps,
    numbered_steps,
    read_catalog,
    step_path,
)
from ftrain.checkpoints.errors import CheckpointError, SaveError, summarize_error
from ftrain.checkpoints.lock import wait_for_lock
from ftrain.checkpoints.manifest import (
    ORBAX_METADATA,
    File,
    Leaf,
    Manifest,
    crc32c_of,
    format_index,
    whole_index,
)
from ftrain.checkpoints.matching import matches_any
from ftrain.checkpoints.orbax_layout import OrbaxSave, leaf_specs, open_leaves, start_orbax_save
from ftrain.checkpoints.snapshot import (
    LeafSnapshot,
    as_orbax_leaf,
    as_orbax_tree,
    digest_of,
    in_parallel,
    is_finite,
    take_snapshot,
)
from ftrain.storage import exists, list_files, raise_if_transient, retry, sync
from ftrain.tree import Tree, named_leaves

_LOCK = ".writer.lock"  # held by the process that writes a checkpoint

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _SaveRequest:
    """A checkpoint to write."""

    directory: Path
    step: int
    snapshot: Tree  # of `LeafSnapshot`
    time: float
    metrics: dict[str, float]
    allow_nonfinite: tuple[str, ...]  # patterns of leaves that may have non-finite values
    extra: dict[str, Any] | None = None  # encoded
    response: OrbaxSave | None = None  # set if Orbax was started by the caller's thread

    @property
    def staged(self) -> Path:
        """Where it is written before it gets its final name."""
        return self.directory / f"{self.step}{SAVING}"


class Writer:
    """Writes checkpoints to a directory, and deletes those that need not stay."""

    def __init__(
        self, retention: Retention, allow_nonfinite: tuple[str, ...], clock: Callable[[], float]
    ):
        self._directory = Path()  # set by `start`
        self._retention = retention
        self._allow_nonfinite = allow_nonfinite
        self._clock = clock
        self._opened = clock()
        self._pending: Future[list[str]] | None = None
        self._inode: int | None = None  # of the directory, once leftovers were removed from it

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
        """Start to write a checkpoint in the background.

        `damaged` steps are set aside first, or they would count among the newest.
        """
        self._directory = directory
        finite_metrics = _select_finite(metrics)
        snapshot = take_snapshot(tree)
        lock = None
        try:
            lock = retry(self._lock_directory) if jax.process_index() == 0 else None
            retry(lambda: self._prepare_directory(step, overwrite, damaged))
            times = [record.time for record in retry(lambda: read_catalog(self._directory).records)]
            now = max([self._clock(), *times])  # a clock may have been set back
            request = _SaveRequest(
                self._directory, step, snapshot, now, finite_metrics, self._allow_nonfinite, extra
            )
            if jax.process_count() > 1:
                # Orbax synchronizes processes: all must call it in the order of their steps.
                response = start_orbax_save(request.staged, as_orbax_tree(tree), ORBAX_METADATA)
                request = dataclasses.replace(request, response=response)
        except BaseException as error:
            if lock is not None:
                lock.close()
            if isinstance(error, OSError):
                raise self._as_save_error(step, error) from error
            raise
        self._pending = _run_in_background(lambda: self._finish(request, lock))

    def complete(
        self, directory: Path, step: int, metrics: Mapping[str, float], extra: dict[str, Any] | None
    ) -> None:
        """Add metrics and extra values to a checkpoint; of several processes, process 0 does it."""
        if jax.process_index() != 0:
            return
        try:
            catalog.complete_checkpoint(
                directory, step, _select_finite(metrics), extra or {}, self._retention, self._opened
            )
        except OSError as error:
            path = step_path(directory, step)
            raise SaveError(
                f"the metrics of {path} were not written: {summarize_error(error)}"
            ) from error

    def wait(self) -> list[str]:
        """Wait for the pending save, and return its warnings."""
        if self._pending is None:
            return []
        future = self._pending
        wait([future])  # if this is interrupted, the save is still pending
        self._pending = None
        return future.result()

    def _finish(self, request: _SaveRequest, lock: IO[str] | None) -> list[str]:
        """In the background thread: write, update the catalog, and return warnings."""
        try:
            nonfinite = _write_with_retries(request)
        except Exception as error:
            _remove_partial(request)
            raise self._as_save_error(request.step, error) from error
        else:
            return [
                *self._warn_of_suspect(request.step, nonfinite),
                *self._update_catalog(request, is_suspect=bool(nonfinite)),
            ]
        finally:
            if lock is not None:
                lock.close()

    def _update_catalog(self, request: _SaveRequest, *, is_suspect: bool) -> list[str]:
        """Add a checkpoint to the catalog. It is written, so a failure here is only a warning."""
        if jax.process_index() != 0:
            return []
        try:
            if is_suspect:
                retry(lambda: catalog.prune_suspects(self._directory, self._retention.keep))
                return []
            record = Record(request.step, request.time, request.metrics)
            retry(
                lambda: catalog.add_checkpoint(
                    self._directory, record, self._retention, self._opened
                )
            )
        except OSError as error:
            path = step_path(self._directory, request.step)
            return [
                f"{path} was saved, but the catalog could not be updated, "
                f"or an older checkpoint not deleted: {error}"
            ]
        return []

    def _warn_of_suspect(self, step: int, nonfinite: list[str]) -> list[str]:
        if not nonfinite:
            return []
        named = ", ".join(nonfinite[:3]) + (", ..." if len(nonfinite) > 3 else "")
        path = self._directory / f"{step}{SUSPECT}"
        why = "it was set aside and is not the latest (allow_nonfinite lists leaves to ignore)"
        return [f"{path} has non-finite leaves: {named}; {why}"]

    def _as_save_error(self, step: int, error: Exception) -> SaveError:
        reason = (
            summarize_error(error)
            if self._is_same_directory()
            else f"{self._directory} no longer exists"
        )
        try:
            steps = ", ".join(map(str, committed_steps(self._directory)))
            kept = f"remaining checkpoints: {steps or 'none'}"
        except OSError as failure:
            kept = f"remaining checkpoints cannot be listed: {failure.strerror}"
        return SaveError(f"{self._directory / str(step)} was not saved: {reason}; {kept}")

    def _lock_directory(self) -> IO[str]:
        """Wait until no other process writes here, and return the lock."""
        if self._inode is None:
            self._directory.mkdir(parents=True, exist_ok=True)
        if not self._is_same_directory():  # Orbax would create it, and hide what was lost
            raise FileNotFoundError(f"{self._directory} no longer exists")
        return wait_for_lock(self._directory / _LOCK)

    def _prepare_directory(self, step: int, overwrite: bool, damaged: set[int]) -> None:
        """Move away what stands where the checkpoint will be; an error if that is a good one."""
        if jax.process_index() == 0:
            self._move_obstacles(step, damaged)
        if step in committed_steps(self._directory) and not overwrite:
            raise CheckpointError(
                f"{step_path(self._directory, step)} exists already; "
                "pass overwrite=True to replace it"
            )

    def _move_obstacles(self, step: int, damaged: set[int]) -> None:
        if self._inode is None:
            catalog.remove_leftovers(self._directory)
            self._inode = self._directory.stat().st_ino
        for each in damaged & {*numbered_steps(self._directory)}:
            catalog.move_aside(step_path(self._directory, each), catalog.DAMAGED)
        path = step_path(self._directory, step)
        if os.path.lexists(path) and step not in committed_steps(self._directory):
            catalog.move_aside(path, catalog.INCOMPLETE)

    def _is_same_directory(self) -> bool:
        """Return True if the directory is still the one that was saved to before."""
        try:
            return self._inode in (None, self._directory.stat().st_ino)
        except FileNotFoundError:
            return self._inode is None
        except OSError:  # it cannot be read now, which does not make it another directory
            return True


def _write_with_retries(request: _SaveRequest) -> list[str]:
    """Write; after a transient error start again, unless several processes save together."""
    if request.response is not None:
        return _write(request)

    def attempt() -> list[str]:
        try:
            return _write(request)
        except Exception as error:
            raise_if_transient(error, request.staged)
            raise

    return retry(attempt, before_retry=lambda: _remove_partial(request))


def _write(request: _SaveRequest) -> list[str]:
    """Write a checkpoint, and return the names of non-finite leaves, which make it suspect."""
    staged = request.staged
    with ThreadPoolExecutor(1) as digesting:
        described = digesting.submit(
            _describe, named_leaves(request.snapshot)
        )  # while Orbax writes
        response = request.response or start_orbax_save(
            staged, jax.tree.map(as_orbax_leaf, request.snapshot), ORBAX_METADATA
        )
        try:
            response.result()
            leaves, nonfinite = described.result()
        except Exception as error:
            if jax.process_index() > 0:
                multihost.report_failure(staged, error)
            raise
    if jax.process_count() > 1:
        leaves, nonfinite = multihost.gather(staged, leaves, nonfinite)
    suspicious = [name for name in nonfinite if not matches_any(name, request.allow_nonfinite)]
    final = f"{request.step}{SUSPECT if suspicious else ''}"
    if jax.process_index() == 0:
        _check_written(staged, leaves)
        _make_manifest(request, leaves, suspicious).write(staged)
        _rename_to_final(request, final)
    multihost.wait_until_renamed(staged, multihost.timeout_for(leaves))
    names = (f"{request.step}{SUSPECT}", f"{request.step}")
    if not any(exists(request.directory / name) for name in names):
        multihost.remove_report(staged)
        raise SaveError("process 0 could not finish it")
    return suspicious


def _describe(snapshot: dict[str, LeafSnapshot]) -> tuple[dict[str, Leaf], list[str]]:
    """Return each leaf for the manifest, and the names of non-finite leaves."""

    def describe(leaf: LeafSnapshot) -> tuple[Leaf, bool]:
        pieces = [(whole_index(leaf.shape), leaf.value())] if leaf.is_whole else leaf.pieces
        digests = {format_index(index, leaf.shape): digest_of(value) for index, value in pieces}
        finite = all(is_finite(value) for _, value in pieces)
        return Leaf(shape=leaf.shape, dtype=leaf.dtype.name, pieces=digests, key=leaf.key), finite

    described = dict(zip(snapshot, in_parallel(describe, snapshot.values()), strict=True))
    leaves = {name: leaf for name, (leaf, _) in described.items()}
    return leaves, [name for name, (_, finite) in described.items() if not finite]


def _check_written(staged: Path, leaves: dict[str, Leaf]) -> None:
    """Check that all leaves are on disk before older checkpoints are deleted.

    Another program may have changed the directory meanwhile.
    """
    specs = leaf_specs(staged)
    stored = {name: leaf for name, leaf in leaves.items() if 0 not in leaf.shape}
    if missing := stored.keys() - specs.keys():
        raise SaveError(f"leaf {min(missing)} was not written")
    written = sum(list_files(staged).values())
    needed = sum(leaf.bytes for leaf in stored.values())
    if written < needed:
        raise SaveError(f"of {needed} bytes only {written} were written")
    for name, found in open_leaves(staged, specs, stored).items():
        if (found.shape, found.dtype) != (stored[name].shape, np.dtype(stored[name].dtype)):
            raise SaveError(f"leaf {name} was written as {found.dtype}{list(found.shape)}")


def _make_manifest(
    request: _SaveRequest, leaves: dict[str, Leaf], suspicious: list[str]
) -> Manifest:
    sizes = list_files(request.staged)
    checksums = in_parallel(lambda name: crc32c_of(request.staged / name), sizes)
    for name in sizes:
        sync(request.staged / name)
    return Manifest(
        step=request.step,
        time=request.time,
        metrics=request.metrics,
        not_finite=suspicious,
        leaves=leaves,
        files={
            name: File(size=size, crc32c=checksum)
            for (name, size), checksum in zip(sizes.items(), checksums, strict=True)
        },
        extra=request.extra,
    )


def _rename_to_final(request: _SaveRequest, name: str) -> None:
    final = request.directory / name
    replaced = final.with_name(f"{name}{REPLACED}")
    if exists(final):
        final.rename(replaced)
    sync(request.staged)
    request.staged.rename(final)
    sync(request.directory)
    if replaced.exists():
        catalog.discard(replaced)


def _remove_partial(request: _SaveRequest) -> None:
    """Delete what was written of a failed save: the disk may be full."""
    if jax.process_index() == 0 and request.directory.is_dir():
        for path in request.directory.glob(f"{request.step}{SAVING}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _select_finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics by which checkpoints can be compared."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _run_in_background(work: Callable[[], T]) -> Future[T]:
    """Run in a new thread, which ends with the work; the program waits for it before it ends."""

    def begin() -> T:
        time.sleep(0.001)  # let the caller return first; else it waits for the GIL, 5 ms each time
        return work()

    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    future = pool.submit(begin)
    pool.shutdown(wait=False)
    return future
