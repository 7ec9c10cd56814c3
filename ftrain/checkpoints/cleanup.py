"""Cleanup: update the catalog of a directory, and rename or delete checkpoints in it.

A directory is renamed before it is deleted, so that half a checkpoint never stands under a step's
name.
"""

import dataclasses
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

from ftrain.checkpoints.catalog import (
    REPLACED,
    Catalog,
    Record,
    Retention,
    lock_catalog,
    read_catalog,
    rotate,
    step_path,
)
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.manifest import MANIFEST_FILE, Manifest, read_manifest
from ftrain.storage import exists, list_names, replacing

# Suffixes of a step's name.
SAVING = ".saving"  # being written
DELETING = ".deleting"  # being deleted
SUSPECT = ".suspect"  # has non-finite leaves
DAMAGED = ".damaged"  # failed verification
INCOMPLETE = ".incomplete"  # not committed, and in the way of a new checkpoint
_LEFTOVER = re.compile(
    rf"\d+({SAVING}.*|(\.\w+)?{DELETING}|\.orbax-checkpoint-tmp.*)|\..+\.json\.\d+"
)


def add_checkpoint(directory: Path, record: Record, retention: Retention, opened: float) -> None:
    """Make a checkpoint that was just written the latest, and delete those that need not stay.

    `opened` is when the directory was first saved to, as far as this process knows. The hours of
    `keep_every_hours` count from there until the catalog has a time of its own.
    """
    with lock_catalog(directory):
        catalog = read_catalog(directory)
        replaced = catalog.find(record.step)
        is_pinned = replaced is not None and replaced.pinned
        others = catalog.without(record.step).records
        records = (*others, dataclasses.replace(record, pinned=is_pinned))
        _rotate(directory, dataclasses.replace(catalog, records=records), retention, opened)


def complete_checkpoint(
    directory: Path,
    step: int,
    metrics: dict[str, float],
    extra: dict[str, Any],
    retention: Retention,
    opened: float,
) -> None:
    """Add metrics and extra values to a checkpoint, and choose again which ones stay.

    Nothing is written if the checkpoint already has all of them.
    """
    with lock_catalog(directory):
        catalog = read_catalog(directory)
        path = step_path(directory, step)
        record = catalog.find(step)
        manifest = read_manifest(path) if record is not None else None
        if record is None or manifest is None:  # just deleted, or written by plain Orbax
            return
        all_metrics = {**manifest.metrics, **metrics}
        all_extra = {**(manifest.extra or {}), **extra} or None
        if all_metrics == manifest.metrics == record.metrics and all_extra == manifest.extra:
            return
        update = {"metrics": all_metrics, "extra": all_extra}
        _replace_manifest(path, manifest.model_copy(update=update))
        catalog = catalog.replace(step, metrics={**record.metrics, **all_metrics})
        _rotate(directory, catalog, retention, opened)


def pin_checkpoint(directory: Path, step: int, pinned: bool) -> None:
    """Pin or unpin a checkpoint in the catalog."""
    with lock_catalog(directory):
        catalog = read_catalog(directory)
        if catalog.find(step) is None:
            raise CheckpointError(
                f"{directory}: the checkpoint of step {step} has just been deleted"
            )
        catalog.replace(step, pinned=pinned).write(directory)


def delete_checkpoint(directory: Path, step: int) -> None:
    """Delete a checkpoint, unless it is pinned."""
    with lock_catalog(directory):
        catalog = read_catalog(directory)
        record = catalog.find(step)
        if record is not None and record.pinned:
            raise CheckpointError(f"{directory / str(step)} is pinned; unpin it first")
        discard(directory / str(step))
        catalog.without(step).write(directory)


def prune_suspects(directory: Path, keep: int | Literal["all"]) -> None:
    """Delete suspects except the first, which is nearest to the cause, and the newest others."""
    if keep == "all":
        return
    paths = [directory / name for name in list_names(directory) if name.endswith(SUSPECT)]
    suspects = sorted(paths, key=lambda path: path.stat().st_mtime)
    for path in suspects[1 : max(1, len(suspects) - keep + 1)]:
        discard(path)


def discard(path: Path) -> None:
    """Rename a checkpoint's directory, then delete it."""
    renamed = path.with_name(f"{path.name}{DELETING}")
    shutil.rmtree(renamed, ignore_errors=True)
    path.rename(renamed)
    shutil.rmtree(renamed)


def move_aside(path: Path, suffix: str) -> Path:
    """Rename a path to a free name with a suffix, and return the new path."""
    aside = path.with_name(f"{path.name}{suffix}")
    number = 1
    while exists(aside):
        number += 1
        aside = path.with_name(f"{path.name}{suffix}{number}")
    return path.rename(aside)


def remove_leftovers(directory: Path) -> None:
    """Finish or undo what a killed process left half written, half deleted or half replaced."""
    for path in sorted(directory.iterdir()):
        if re.fullmatch(rf"\d+(\{SUSPECT})?\{REPLACED}", path.name):
            final = path.with_name(path.name.removesuffix(REPLACED))
            discard(path) if exists(final) else path.rename(final)
        elif _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _rotate(directory: Path, catalog: Catalog, retention: Retention, opened: float) -> None:
    """Write the catalog of the checkpoints that stay, and delete the others."""
    first = opened + (retention.every_hours or 0) * 3600
    after = first if catalog.keep_after is None else catalog.keep_after
    kept, deleted, after = rotate(catalog.records, retention, after)
    Catalog(tuple(kept), after if retention.every_hours else None, retention).write(directory)
    for record in deleted:
        discard(directory / str(record.step))


def _replace_manifest(path: Path, manifest: Manifest) -> None:
    # The temporary file is outside of the checkpoint: inside, verification would not expect it.
    # If this process is killed, `remove_leftovers` deletes it.
    temporary = path.with_name(f".{path.name}.{MANIFEST_FILE}.{os.getpid()}")
    with replacing(path / MANIFEST_FILE, temporary):
        temporary.write_text(manifest.as_text())
