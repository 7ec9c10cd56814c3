"""ftrain migrate NAME"""

from typing import Annotated

import typer


def migrate(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Such as AdamOptimizer or tf.gradients.")
    ],
) -> None:
    """Print what stands here for a NAME of tf.train."""
    from ftrain.migration import find

    try:
        reference, counterpart = find(name)
    except LookupError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(f"{reference} -> {', '.join(counterpart.ours)}")
    if counterpart.note:
        typer.echo(counterpart.note)
