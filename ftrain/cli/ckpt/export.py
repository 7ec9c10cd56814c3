"""ftrain ckpt export CHECKPOINT --to safetensors|npz"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ftrain.cli.ckpt.arguments import Checkpoint, Exclude, Include
from ftrain.cli.tables import show_bytes


def export(
    checkpoint: Checkpoint,
    to: Annotated[
        Literal["safetensors", "npz"] | None,
        typer.Option(help="The format; if not given, that of FILE."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; if not given, named by the step.")
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
            f"{out} has neither the suffix .safetensors nor .npz; say --to safetensors or --to npz"
        )
    if to is not None and by_name in {"safetensors", "npz"} - {to}:
        raise typer.BadParameter(f"{out} would be {to}; the format and the suffix do not agree")
    kind: Literal["safetensors", "npz"] = to or ("npz" if by_name == "npz" else "safetensors")
    reader = open_reader(checkpoint)
    path = out or Path(f"{reader.path.name}.{kind}")
    if path.exists():
        raise CheckpointError(f"{path} exists already; choose another name, --out FILE")
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task("exporting", total=len(reader.variables))
        patterns = {"include": include or (), "exclude": exclude or ()}
        names = write(reader, path, kind, **patterns, done=lambda name: progress.advance(bar))
    typer.echo(f"{path}: {len(names):,} leaves, {show_bytes(path.stat().st_size)}")
