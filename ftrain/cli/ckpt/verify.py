"""ftrain ckpt verify CHECKPOINT"""

from pathlib import Path

import typer

from ftrain.cli.ckpt.arguments import Checkpoint
from ftrain.storage import list_names


def verify(checkpoint: Checkpoint) -> None:
    """Verify every file and leaf of CHECKPOINT, or of all checkpoints of a run; exits with 1 if one is damaged."""
    from rich.console import Console
    from rich.progress import track

    paths, errors, damaged = _meant(checkpoint), Console(stderr=True), 0
    for path in track(
        paths, "verifying", console=errors, transient=True, disable=not errors.is_terminal
    ):
        damage, note = _damage(path)
        damaged += bool(damage)
        typer.echo(f"{path}: {'DAMAGED' if damage else f'good{note}'}")
        for each in damage:
            typer.echo(f"  {each}")
    raise typer.Exit(1 if damaged else 0)


def _damage(path: Path) -> tuple[list[str], str]:
    """What is wrong with a checkpoint, and what is to be said of one with which nothing is."""
    from ftrain.checkpoints import CheckpointError, open_reader
    from ftrain.checkpoints.manifest import verify as find_damage
    from ftrain.formats import is_tf_checkpoint

    if not is_tf_checkpoint(path):
        return find_damage(path), "" if (
            path / "manifest.json"
        ).exists() else ", as far as one can tell: no manifest"
    damage, reader = [], open_reader(path)
    for name in reader.variables:
        try:
            reader.read(name)
        except CheckpointError as error:
            damage.append(f"{error}")
    return damage, ""


def _meant(path: Path) -> list[Path]:
    """The checkpoint, or all of those of a directory, also those that were put aside as suspect."""
    from ftrain.checkpoints.catalog import numbered_steps
    from ftrain.checkpoints.paths import checkpoint_directory, find_checkpoint

    directory = checkpoint_directory(path)
    whole = [directory / str(step) for step in numbered_steps(directory)]
    suspects = [directory / name for name in list_names(directory) if name.endswith(".suspect")]
    return [*whole, *suspects] if whole else [find_checkpoint(path)]
