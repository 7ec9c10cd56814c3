"""ftrain ckpt verify CHECKPOINT"""

from pathlib import Path

import typer

from ftrain.cli.ckpt.arguments import Checkpoint


def verify(checkpoint: Checkpoint) -> None:
    """Verify every file and leaf of CHECKPOINT, or of all checkpoints of a run; exits with 1 if one is damaged."""
    from rich.console import Console
    from rich.progress import track

    from ftrain.checkpoints.verifying import verify as find_damage

    paths, errors, damaged = _meant(checkpoint), Console(stderr=True), 0
    for path in track(paths, "verifying", console=errors, transient=True, disable=not errors.is_terminal):
        damage, manifest = find_damage(path), (path / "manifest.json").exists()
        damaged += bool(damage)
        unknown = "" if manifest else " as far as can be told: it has no manifest"
        typer.echo(f"{path}: {'DAMAGED' if damage else f'good{unknown}'}")
        for each in damage:
            typer.echo(f"  {each}")
    raise typer.Exit(1 if damaged else 0)


def _meant(path: Path) -> list[Path]:
    """The checkpoint, or all of those of a directory."""
    from ftrain.checkpoints.catalog import numbered
    from ftrain.checkpoints.finding import directory_of, locate

    directory = directory_of(path)
    return [directory / str(step) for step in numbered(directory)] or [locate(path)]
