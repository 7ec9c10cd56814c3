"""ftrain ckpt list RUN"""

import re
from datetime import datetime
from pathlib import Path

from ftrain.cli.ckpt.arguments import Run
from ftrain.cli.tables import print_table, show_bytes
from ftrain.storage import is_directory, list_names

_ASIDE = re.compile(r"(\d+)\.(saving|suspect|damaged|incomplete)(.*)")
_MEANING = {
    "saving": "being saved, or never finished",
    "suspect": "put aside: not finite",
    "damaged": "put aside: damaged",
    "incomplete": "put aside: never finished",
}


def list_checkpoints(run: Run) -> None:
    """List the checkpoints of RUN: when each was saved, how large it is, its metrics, and why it is kept."""
    from rich.table import Table

    from ftrain.checkpoints import CheckpointError, read_catalog
    from ftrain.checkpoints.catalog import best_of
    from ftrain.checkpoints.paths import checkpoint_directory, describe_path

    directory = checkpoint_directory(run)
    if not is_directory(directory):
        raise CheckpointError(
            f"{run} {describe_path(run)}; expected a run, or a directory of checkpoints"
        )
    catalog = read_catalog(directory)
    records, policy = catalog.records, catalog.retention
    best = best_of(records, policy, policy.best)
    metric = policy.metric if policy.best else "loss"
    aside = [directory / name for name in list_names(directory) if _ASIDE.fullmatch(name)]
    if not records and not aside:
        raise CheckpointError(f"{run} holds no checkpoint")
    table = Table(box=None)
    for column in ("step", "saved", "size", metric, "why it is there"):
        table.add_column(column, justify="left" if column.startswith("why") else "right")
    for record in records:
        reasons = {
            "latest": record is records[-1],
            f"among the best {policy.best}" if policy.best > 1 else "the best": record in best,
            "pinned": record.pinned,
            "newest": record.role == "newest",
            "kept for good": record.role == "kept",
        }
        value = f"{record.metrics[metric]:.4g}" if metric in record.metrics else ""
        why = ", ".join(reason for reason, is_one in reasons.items() if is_one)
        table.add_row(
            f"{record.step}", _when(record.time), _size(directory / str(record.step)), value, why
        )
    for path in filter(is_directory, aside):
        kind = _ASIDE.fullmatch(path.name)
        why = _MEANING[kind[2]] if kind else ""
        table.add_row(path.name, _when(path.stat().st_mtime), _size(path), "", why)
    print_table(table)


def _when(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # a file may have any time
        return "unknown"


def _size(path: Path) -> str:
    return show_bytes(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
