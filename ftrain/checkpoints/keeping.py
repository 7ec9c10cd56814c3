"""Keeping a directory of checkpoints: entering a new one, pinning, and letting go of what is no longer wanted."""

from pathlib import Path

from ftrain.checkpoints.catalog import Catalog, changing, read_catalog
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.retention import Record, Retention, rotate
from ftrain.checkpoints.writing import SUSPECT, discard


def enter(directory: Path, record: Record, retention: Retention, opened: float) -> None:
    """Make a checkpoint that was just written the latest, and delete those that need not stay beside it.

    `opened` is when the directory was first saved to, as far as one knows: the hours of `keep_every_hours` count from
    there, until the catalog has a time of its own.
    """
    with changing(directory):
        catalog = read_catalog(directory)
        others = [each for each in catalog.records if each.step != record.step]
        latest = max([record.time, *(each.time for each in others)])  # clocks are put back at times
        records = [*others, Record(record.step, latest, record.metrics)]
        first = opened + (retention.every_hours or 0) * 3600
        kept, leaving, due = rotate(records, retention, first if catalog.keep_after is None else catalog.keep_after)
        Catalog(tuple(kept), due if retention.every_hours else None).write(directory)
        for each in leaving:
            discard(directory / str(each.step))


def let_go_of_suspects(directory: Path, keep: int | None) -> None:
    """Of what was put aside as suspect, only the newest stay."""
    suspects = sorted(directory.glob(f"*{SUSPECT}"), key=lambda path: path.stat().st_mtime)
    for path in suspects[:-keep] if keep is not None else []:
        discard(path)


def pin(directory: Path, step: int, pinned: bool) -> None:
    with changing(directory):
        read_catalog(directory).replace(step, pinned=pinned).write(directory)


def delete(directory: Path, step: int) -> None:
    """Delete a checkpoint, unless it is pinned."""
    with changing(directory):
        catalog = read_catalog(directory)
        if any(record.pinned for record in catalog.records if record.step == step):
            raise CheckpointError(f"{directory / str(step)} is pinned; unpin it first")
        discard(directory / str(step))
        catalog.without(step).write(directory)
