"""ftrain migrate NAME"""

from typing import Annotated

import typer


def migrate(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A name of TensorFlow 1, such as AdamOptimizer or tf.gradients."
        ),
    ],
) -> None:
    """Print what replaces a NAME of tf.train."""
    from ftrain.migration import find

    try:
        full_name, counterpart = find(name)
    except LookupError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(f"{full_name} -> {', '.join(counterpart.ours)}")
    if counterpart.note:
        typer.echo(counterpart.note)
