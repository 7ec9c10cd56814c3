"""ftrain ckpt export CHECKPOINT --to safetensors|npz"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ftrain.cli.ckpt.arguments import Checkpoint, Exclude, Include
from ftrain.cli.tables import show_bytes


def export(
    checkpoint: Checkpoint,
    to: Annotated[Literal["safetensors", "npz"], typer.Option(help="The format.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The file to write; if not given, named by the step.")] = None,
    include: Include = None,
    exclude: Exclude = None,
) -> None:
    """Write the leaves of CHECKPOINT to one file that other programs read."""
    from rich.console import Console
    from rich.progress import Progress

    from ftrain.checkpoints import CheckpointError, open_reader
    from ftrain.checkpoints import export as write

    reader = open_reader(checkpoint)
    path = out or Path(f"{reader.path.name}.{to}")
    if path.exists():
        raise CheckpointError(f"{path} exists already; choose another name, --out FILE")
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("exporting", total=len(reader.variables))
        patterns = {"include": include or (), "exclude": exclude or ()}
        names = write(reader, path, to, **patterns, done=lambda name: progress.advance(bar))
    typer.echo(f"{path}: {len(names):,} leaves, {show_bytes(path.stat().st_size)}")
