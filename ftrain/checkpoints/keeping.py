"""Keeping a directory of checkpoints: entering a new one, pinning, and letting go of what is no longer wanted."""

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

from ftrain.checkpoints.catalog import Catalog, changing, path_of, read_catalog
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.manifest import NAME, Manifest, read_manifest
from ftrain.checkpoints.retention import Record, Retention, rotate
from ftrain.checkpoints.writing import SUSPECT, discard
from ftrain.formats.whole_files import sync
from ftrain.storage import list_names


def enter(directory: Path, record: Record, retention: Retention, opened: float) -> None:
    """Make a checkpoint that was just written the latest, and delete those that need not stay beside it.

    `opened` is when the directory was first saved to, as far as one knows: the hours of `keep_every_hours` count from
    there, until the catalog has a time of its own.
    """
    with changing(directory):
        catalog = read_catalog(directory)
        others = [each for each in catalog.records if each.step != record.step]
        is_pinned = any(
            each.pinned for each in catalog.records if each.step == record.step
        )  # the one it replaces
        records = (*others, dataclasses.replace(record, pinned=is_pinned))
        _rotate(directory, dataclasses.replace(catalog, records=records), retention, opened)


def complete(
    directory: Path,
    step: int,
    metrics: dict[str, float],
    extra: dict[str, Any],
    retention: Retention,
    opened: float,
) -> None:
    """Add metrics and extra values to a checkpoint that is there, and delete those that it takes the place of.

    Nothing is written if all of it is known already.
    """
    with changing(directory):
        catalog, path = read_catalog(directory), path_of(directory, step)
        record = next((each for each in catalog.records if each.step == step), None)
        manifest = read_manifest(path) if record is not None else None
        if record is None or manifest is None:  # deleted just now, or written by plain Orbax
            return
        merged = {**manifest.metrics, **metrics}
        together = {**(manifest.extra or {}), **extra} or None
        if merged == manifest.metrics == record.metrics and together == manifest.extra:
            return
        _replace_manifest(path, manifest.model_copy(update={"metrics": merged, "extra": together}))
        _rotate(
            directory,
            catalog.replace(step, metrics={**record.metrics, **merged}),
            retention,
            opened,
        )


def _rotate(directory: Path, catalog: Catalog, retention: Retention, opened: float) -> None:
    """Write the catalog of those that stay, and delete the others."""
    first = opened + (retention.every_hours or 0) * 3600
    after = first if catalog.keep_after is None else catalog.keep_after
    kept, leaving, due = rotate(catalog.records, retention, after)
    Catalog(tuple(kept), due if retention.every_hours else None, retention).write(directory)
    for each in leaving:
        discard(directory / str(each.step))


def _replace_manifest(path: Path, manifest: Manifest) -> None:
    """At no moment is there a file in the checkpoint that does not belong there, or a manifest that is not whole."""
    beside = path.with_name(f".{path.name}.manifest.json.{os.getpid()}")  # which a sweep deletes
    beside.write_text(manifest.as_text())
    sync(beside)
    beside.replace(path / NAME)
    sync(path)


def let_go_of_suspects(directory: Path, keep: int | Literal["all"]) -> None:
    """Of what was put aside as suspect, the first stays, which is nearest to the cause, and the newest others."""
    paths = [directory / name for name in list_names(directory) if name.endswith(SUSPECT)]
    suspects = sorted(paths, key=lambda path: path.stat().st_mtime)
    for path in suspects[1 : max(1, len(suspects) - keep + 1)] if keep != "all" else []:
        discard(path)


def pin(directory: Path, step: int, pinned: bool) -> None:
    with changing(directory):
        catalog = read_catalog(directory)
        if not any(record.step == step for record in catalog.records):
            raise CheckpointError(
                f"{directory}: the checkpoint of step {step} has just been deleted"
            )
        catalog.replace(step, pinned=pinned).write(directory)


def delete(directory: Path, step: int) -> None:
    """Delete a checkpoint, unless it is pinned."""
    with changing(directory):
        catalog = read_catalog(directory)
        if any(record.pinned for record in catalog.records if record.step == step):
            raise CheckpointError(f"{directory / str(step)} is pinned; unpin it first")
        discard(directory / str(step))
        catalog.without(step).write(directory)
