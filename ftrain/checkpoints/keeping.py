"""Keeping a directory of checkpoints: entering a new one, pinning, and letting go of what is no longer wanted."""

import dataclasses
from pathlib import Path
from typing import Literal

from ftrain.checkpoints.catalog import Catalog, changing, read_catalog
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.retention import Record, Retention, rotate
from ftrain.checkpoints.writing import SUSPECT, discard
from ftrain.storage import list_names


def enter(directory: Path, record: Record, retention: Retention, opened: float) -> None:
    """Make a checkpoint that was just written the latest, and delete those that need not stay beside it.

    `opened` is when the directory was first saved to, as far as one knows: the hours of `keep_every_hours` count from
    there, until the catalog has a time of its own.
    """
    with changing(directory):
        catalog = read_catalog(directory)
        others = [each for each in catalog.records if each.step != record.step]
        is_pinned = any(each.pinned for each in catalog.records if each.step == record.step)  # the one it replaces
        records = [*others, dataclasses.replace(record, pinned=is_pinned)]
        first = opened + (retention.every_hours or 0) * 3600
        kept, leaving, due = rotate(records, retention, first if catalog.keep_after is None else catalog.keep_after)
        Catalog(tuple(kept), due if retention.every_hours else None, retention).write(directory)
        for each in leaving:
            discard(directory / str(each.step))


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
            raise CheckpointError(f"{directory}: the checkpoint of step {step} has just been deleted")
        catalog.replace(step, pinned=pinned).write(directory)


def delete(directory: Path, step: int) -> None:
    """Delete a checkpoint, unless it is pinned."""
    with changing(directory):
        catalog = read_catalog(directory)
        if any(record.pinned for record in catalog.records if record.step == step):
            raise CheckpointError(f"{directory / str(step)} is pinned; unpin it first")
        discard(directory / str(step))
        catalog.without(step).write(directory)
