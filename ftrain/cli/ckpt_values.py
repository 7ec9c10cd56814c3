"""ftrain ckpt show and diff: the values of checkpoints, leaf by leaf."""

from typing import Annotated

import typer

from ftrain.cli.arguments import Checkpoint, Exclude, Include
from ftrain.cli.output import print_table, show_bytes, show_number, track_items


def show(
    checkpoint: Checkpoint,
    include: Include = None,
    exclude: Exclude = None,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="Only shapes, dtypes and sizes; reads no values.")
    ] = False,
) -> None:
    """Show the leaves of CHECKPOINT as a tree: shapes, dtypes, sizes, statistics of the values."""
    from rich.table import Table

    from ftrain.checkpoints import open_reader
    from ftrain.checkpoints.matching import Selection
    from ftrain.checkpoints.reader import describe_values

    reader = open_reader(checkpoint)
    chosen = Selection(include=tuple(include or ()), exclude=tuple(exclude or ()))
    names = [name for name in reader.variables if chosen.takes(name)]
    table = Table(box=None, title=f"{reader.path}", title_justify="left")
    for column in ("leaf", "shape", "dtype"):
        table.add_column(column)
    for column in ("size", "mean", "std", "min", "max", "zeros", "non-finite"):
        table.add_column(column, justify="right")
    shown: tuple[str, ...] = ()  # the scopes of the row above
    for name in track_items(names, "reading", quiet=shapes):
        *scopes, own = name.split("/")
        for depth in range(len(scopes)):
            if shown[: depth + 1] != tuple(scopes[: depth + 1]):
                table.add_row("  " * depth + f"{scopes[depth]}/")
        shown = tuple(scopes)
        variable = reader.variables[name]
        indented = "  " * len(scopes) + own
        row = [indented, f"{list(variable.shape)}", variable.dtype, show_bytes(variable.bytes)]
        statistics = None if shapes else describe_values(reader.read(name))
        if statistics is not None:
            row += [show_number(value) for value in statistics[:4]]
            row += [f"{statistics.zeros:.1%}"]
            row += [f"{statistics.not_finite:,}" if statistics.not_finite else ""]
        table.add_row(*row)
    print_table(table)
    total = sum(reader.variables[name].bytes for name in names)
    typer.echo(f"{len(names):,} leaves, {show_bytes(total)}")


def diff(
    a: Checkpoint,
    b: Checkpoint,
    include: Include = None,
    exclude: Exclude = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show the leaves that are the same, too.")
    ] = False,
) -> None:
    """Compare two checkpoints leaf by leaf; exit with 1 if they differ."""
    from rich.table import Table

    from ftrain.checkpoints import open_reader
    from ftrain.checkpoints.matching import Selection, describe_leaf
    from ftrain.checkpoints.reader import compare_values

    left = open_reader(a)
    right = open_reader(b)
    chosen = Selection(include=tuple(include or ()), exclude=tuple(exclude or ()))
    in_either = sorted(left.variables.keys() | right.variables.keys())
    names = [name for name in in_either if chosen.takes(name)]
    table = Table(box=None)
    for column in ("leaf", "", "max abs", "max rel", "elements"):
        table.add_column(column, justify="left" if column in ("leaf", "") else "right")
    differing = 0
    for name in track_items(names, "comparing"):
        one = left.variables.get(name)
        other = right.variables.get(name)
        if one is None or other is None:
            row = [name, f"only in {left.path if other is None else right.path}"]
        elif one != other:
            row = [name, f"{describe_leaf(one)} and {describe_leaf(other)}"]
        else:
            found = compare_values(left.read(name), right.read(name))
            largest = [show_number(found.absolute), show_number(found.relative)]
            row = [name, "same"]
            if found.elements:
                row = [name, "differs", *largest, f"{found.elements:,}"]
        differing += row[1] != "same"
        if everything or row[1] != "same":
            table.add_row(*row)
    if table.row_count:
        print_table(table)
    typer.echo(f"{len(names) - differing:,} of {len(names):,} leaves are the same")
    raise typer.Exit(1 if differing else 0)
