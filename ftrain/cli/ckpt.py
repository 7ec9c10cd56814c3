"""ftrain ckpt: list, verify, export, remove and pin checkpoints."""

import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ftrain.cli.arguments import Checkpoint, Exclude, Include, Run, Steps, parse_step
from ftrain.cli.ckpt_values import diff, show
from ftrain.cli.output import print_table, show_bytes, track_items
from ftrain.storage import is_directory, list_names

if TYPE_CHECKING:
    from ftrain.checkpoints import CheckpointManager

_ASIDE = re.compile(r"(\d+)\.(saving|suspect|damaged|incomplete)(.*)")
_ASIDE_MEANING = {
    "saving": "being saved, or never finished",
    "suspect": "set aside: non-finite",
    "damaged": "set aside: damaged",
    "incomplete": "set aside: never finished",
}


def list_checkpoints(run: Run) -> None:
    """List the checkpoints of RUN: time, size, metric, and why each is kept."""
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
    records = catalog.records
    policy = catalog.retention
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
        why = ", ".join(reason for reason, applies in reasons.items() if applies)
        size = _size(directory / str(record.step))
        table.add_row(f"{record.step}", _show_time(record.time), size, value, why)
    for path in filter(is_directory, aside):
        kind = _ASIDE.fullmatch(path.name)
        why = _ASIDE_MEANING[kind[2]] if kind else ""
        table.add_row(path.name, _show_time(path.stat().st_mtime), _size(path), "", why)
    print_table(table)


def _show_time(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # a file may have any time
        return "unknown"


def _size(path: Path) -> str:
    return show_bytes(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))


def verify(checkpoint: Checkpoint) -> None:
    """Verify every file and leaf of CHECKPOINT, or of all of a run; exit with 1 on damage."""
    damaged = 0
    for path in track_items(_selected(checkpoint), "verifying"):
        damage, note = _find_damage(path)
        damaged += bool(damage)
        typer.echo(f"{path}: {'DAMAGED' if damage else f'good{note}'}")
        for each in damage:
            typer.echo(f"  {each}")
    raise typer.Exit(1 if damaged else 0)


def _selected(path: Path) -> list[Path]:
    """Return the checkpoint, or all of a directory with those set aside as suspect."""
    from ftrain.checkpoints.catalog import numbered_steps
    from ftrain.checkpoints.paths import checkpoint_directory, find_checkpoint

    directory = checkpoint_directory(path)
    complete = [directory / str(step) for step in numbered_steps(directory)]
    suspects = [directory / name for name in list_names(directory) if name.endswith(".suspect")]
    return [*complete, *suspects] if complete else [find_checkpoint(path)]


def _find_damage(path: Path) -> tuple[list[str], str]:
    """Return the damage of a checkpoint, and a note for one without damage."""
    from ftrain.checkpoints import CheckpointError, open_reader
    from ftrain.checkpoints.manifest import verify as find_damage
    from ftrain.formats import find_safetensors, is_tf_checkpoint

    has_checksums = is_tf_checkpoint(path) or path.suffix == ".npz"
    if not has_checksums and find_safetensors(path) is None:
        has_manifest = (path / "manifest.json").exists()
        note = "" if has_manifest else " (no manifest: only checked that its leaves can be read)"
        return find_damage(path), note
    damage: list[str] = []
    reader = open_reader(path)
    for name in reader.variables:
        try:
            reader.read(name)
        except CheckpointError as error:
            damage.append(f"{error}")
    return (
        damage,
        "" if has_checksums else " (no checksums: only checked that its leaves can be read)",
    )


def export(
    checkpoint: Checkpoint,
    to: Annotated[
        Literal["safetensors", "npz"] | None,
        typer.Option(help="The format; by default from the suffix of FILE."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default named by the step.")
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
) -> None:
    """Write the leaves of CHECKPOINT to one file that other programs read."""
    from rich.console import Console
    from rich.progress import Progress

    from ftrain.checkpoints import CheckpointError, open_reader
    from ftrain.checkpoints import export as write

    by_name = out.suffix.removeprefix(".") if out else ""
    if to is None and out is not None and by_name not in ("safetensors", "npz"):
        raise typer.BadParameter(
            f"{out} has neither the suffix .safetensors nor .npz; pass --to safetensors or --to npz"
        )
    if to is not None and by_name in {"safetensors", "npz"} - {to}:
        raise typer.BadParameter(
            f"the suffix of {out} does not match --to {to}; change one of them"
        )
    kind: Literal["safetensors", "npz"] = to or ("npz" if by_name == "npz" else "safetensors")
    reader = open_reader(checkpoint)
    path = out or Path(f"{reader.path.name}.{kind}")
    if path.exists():
        raise CheckpointError(f"{path} exists already; choose another name with --out FILE")
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("exporting", total=len(reader.variables))
        patterns = {"include": include or (), "exclude": exclude or ()}
        names = write(reader, path, kind, **patterns, done=lambda name: progress.advance(bar))
    typer.echo(f"{path}: {len(names):,} leaves, {show_bytes(path.stat().st_size)}")


def remove(
    run: Run,
    steps: Steps = None,
    force: Annotated[
        bool, typer.Option("--force", help="Remove the last one that can be restored, too.")
    ] = False,
) -> None:
    """Remove checkpoints of RUN; no pinned one, and the last good one only with --force."""
    from ftrain.checkpoints import CheckpointError, CheckpointManager
    from ftrain.checkpoints.catalog import discard
    from ftrain.checkpoints.paths import checkpoint_directory

    run, steps = _split(run, steps)
    manager = CheckpointManager(checkpoint_directory(run))
    for step in _numbered(manager, steps):
        path = manager.directory / (str(int(step)) if step.isdecimal() else step)
        if _is_aside(step) and path.is_dir():
            discard(path)
        elif not force and step.isdecimal() and manager.steps() == [int(step)]:
            raise CheckpointError(f"{path} is the last checkpoint of {run}; --force removes it too")
        else:
            manager.delete(parse_step(step))
        typer.echo(f"removed {path}")


def pin(run: Run, steps: Steps = None) -> None:
    """Keep checkpoints of RUN until they are unpinned."""
    _pin(run, steps, True)


def unpin(run: Run, steps: Steps = None) -> None:
    """Let a run delete checkpoints again when newer ones replace them."""
    _pin(run, steps, False)


def _pin(run: Path, steps: list[str] | None, pinned: bool) -> None:
    from ftrain.checkpoints import CheckpointManager
    from ftrain.checkpoints.paths import checkpoint_directory

    run, steps = _split(run, steps)
    manager = CheckpointManager(checkpoint_directory(run))
    for step in _numbered(manager, steps):
        manager.pin(parse_step(step), pinned)
        typer.echo(f"{'pinned' if pinned else 'unpinned'} {manager.directory / step}")


def _split(run: Path, steps: list[str] | None) -> tuple[Path, list[str]]:
    """Return a run and its steps, which may be given as RUN STEP... or as RUN/STEP."""
    if steps:
        return run, steps
    if not run.name.partition(".")[0].isdecimal() and run.name not in ("best", "latest"):
        raise typer.BadParameter(f"the steps are missing: pass {run} STEP...")
    return run.parent, [run.name]


def _is_aside(step: str) -> bool:
    """True for the name of a checkpoint that was set aside, such as 400.suspect."""
    is_numbered = step.partition(".")[0].isdecimal()
    return is_numbered and not step.isdecimal() and "/" not in step


def _numbered(manager: "CheckpointManager", steps: list[str]) -> list[str]:
    """Return the steps with numbers for best and latest, before any of them is changed."""
    return [
        str(manager.step_of(parse_step(step))) if step in ("best", "latest") else step
        for step in steps
    ]


app = typer.Typer(
    help="List, show, compare, verify, export and remove checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command(name="list")(list_checkpoints)
app.command()(show)
app.command()(diff)
app.command()(verify)
app.command()(export)
app.command(name="rm")(remove)
app.command()(pin)
app.command()(unpin)
