"""The arguments that the commands about checkpoints share."""

from pathlib import Path
from typing import Annotated

import typer

CHECKPOINT = (
    "A checkpoint, such as runs/digits/checkpoints/400, or runs/digits/400 for short; a run, or a directory of "
    "checkpoints, for its latest; or the prefix of one of TensorFlow's."
)
Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help=CHECKPOINT)]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run, such as runs/digits, or a directory of checkpoints."
    ),
]
Steps = Annotated[
    list[str] | None,
    typer.Argument(metavar="STEP...", help="Their steps, or names as 400.suspect."),
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", help="Only leaves whose whole name matches this expression."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", help="Not the leaves whose whole name matches this expression."),
]
