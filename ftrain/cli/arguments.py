"""The arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="A TOML file, such as configs/digits.toml, or the directory of a run.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Overrides, such as optimizer.learning_rate=0.01."
    ),
]
