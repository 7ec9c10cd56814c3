"""ftrain ckpt diff A B"""

from typing import Annotated

import typer

from ftrain.cli.ckpt.arguments import Checkpoint, Exclude, Include
from ftrain.cli.tables import print_table, show_number


def diff(
    a: Checkpoint,
    b: Checkpoint,
    include: Include = None,
    exclude: Exclude = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the leaves that are the same.")
    ] = False,
) -> None:
    """Compare two checkpoints leaf by leaf; exits with 1 if they differ."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from ftrain.checkpoints import open_reader
    from ftrain.checkpoints.matching import Selection, describe_leaf
    from ftrain.checkpoints.reader import compare_values

    left, right = open_reader(a), open_reader(b)
    chosen = Selection(include=tuple(include or ()), exclude=tuple(exclude or ()))
    names = [
        name
        for name in sorted(left.variables.keys() | right.variables.keys())
        if chosen.takes(name)
    ]
    table = Table(box=None)
    for column in ("leaf", "", "max abs", "max rel", "elements"):
        table.add_column(column, justify="left" if column in ("leaf", "") else "right")
    differing, errors = 0, Console(stderr=True)
    for name in track(
        names, "comparing", console=errors, transient=True, disable=not errors.is_terminal
    ):
        if name not in right.variables or name not in left.variables:
            row = [name, f"only in {left.path if name in left.variables else right.path}"]
        elif left.variables[name] != right.variables[name]:
            row = [
                name,
                f"{describe_leaf(left.variables[name])} and {describe_leaf(right.variables[name])}",
            ]
        else:
            found = compare_values(left.read(name), right.read(name))
            row = [name, "same"]
            if found.elements:
                figures = [
                    show_number(found.absolute),
                    show_number(found.relative),
                    f"{found.elements:,}",
                ]
                row = [name, "differs", *figures]
        differing += row[1] != "same"
        if everything or row[1] != "same":
            table.add_row(*row)
    if table.row_count:
        print_table(table)
    typer.echo(f"{len(names) - differing:,} of {len(names):,} leaves are the same")
    raise typer.Exit(1 if differing else 0)
