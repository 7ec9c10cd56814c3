"""ftrain ckpt show CHECKPOINT"""

from typing import Annotated

import typer

from ftrain.cli.ckpt.arguments import Checkpoint, Exclude, Include
from ftrain.cli.tables import print_table, show_bytes, show_number


def show(
    checkpoint: Checkpoint,
    include: Include = None,
    exclude: Exclude = None,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="Only shapes, dtypes and sizes; reads no values.")
    ] = False,
) -> None:
    """Show the leaves of CHECKPOINT as a tree: shapes, dtypes, sizes, and what their values are like."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from ftrain.checkpoints import open_reader
    from ftrain.checkpoints.matching import Selection
    from ftrain.checkpoints.reader import describe_values

    reader = open_reader(checkpoint)
    chosen = Selection(include=tuple(include or ()), exclude=tuple(exclude or ()))
    names = [name for name in reader.variables if chosen.takes(name)]
    table = Table(box=None, title=f"{reader.path}", title_justify="left")
    for column in (
        "leaf",
        "shape",
        "dtype",
        "size",
        "mean",
        "std",
        "min",
        "max",
        "zeros",
        "not finite",
    ):
        table.add_column(
            column, justify="left" if column in ("leaf", "shape", "dtype") else "right"
        )
    shown: tuple[str, ...] = ()
    errors = Console(stderr=True)
    for name in track(
        names, "reading", console=errors, transient=True, disable=shapes or not errors.is_terminal
    ):
        *scopes, own = name.split("/")
        for depth in range(len(scopes)):
            if shown[: depth + 1] != tuple(scopes[: depth + 1]):
                table.add_row("  " * depth + f"{scopes[depth]}/")
        shown = tuple(scopes)
        variable = reader.variables[name]
        row = [
            "  " * len(scopes) + own,
            f"{list(variable.shape)}",
            variable.dtype,
            show_bytes(variable.bytes),
        ]
        statistics = None if shapes else describe_values(reader.read(name))
        if statistics is not None:
            row += [show_number(value) for value in statistics[:4]]
            row += [
                f"{statistics.zeros:.1%}",
                f"{statistics.not_finite:,}" if statistics.not_finite else "",
            ]
        table.add_row(*row)
    print_table(table)
    total = sum(reader.variables[name].bytes for name in names)
    typer.echo(f"{len(names):,} leaves, {show_bytes(total)}")
