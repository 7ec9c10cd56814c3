"""Command-line arguments that several commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftrain.storage import is_transient

if TYPE_CHECKING:
    from ftrain.checkpoints.paths import StepName

# For commands that train, or check a config.
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

# For `ftrain ckpt`.
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint, such as runs/digits/400, runs/digits/best or runs/digits/latest; a run "
        "or a directory of checkpoints, for its latest; the prefix of a TensorFlow checkpoint; a "
        ".safetensors or .npz file, or a directory of safetensors files with an index.",
    ),
]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run, such as runs/digits, or a directory of checkpoints."
    ),
]
Steps = Annotated[
    list[str] | None,
    typer.Argument(metavar="STEP...", help="Steps, best, latest, or names such as 400.suspect."),
]
StepOption = Annotated[
    str | None,
    typer.Option(
        metavar="STEP",
        help="The checkpoint: a step, best or latest; by default the result of the run, which is "
        "the latest, or the best with checkpoint.restore_best.",
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", help="Only leaves whose full name matches this regular expression."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", help="No leaves whose full name matches this regular expression."),
]

# For `ftrain data`.
Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILES...",
        help="Record files, plain or compressed, or patterns such as 'data/*.tfrecord'.",
    ),
]
MaxRecordBytes = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="BYTES",
        help="Refuse longer records (default 256 MiB) and lines or rows of tables (64 MiB).",
    ),
]


class DataCommandError(ValueError):
    """A mistake in the arguments of a data command."""


def parse_step(step: str) -> "StepName":
    """Return a step that a user typed: a number, best or latest."""
    if step in ("best", "latest"):
        return step  # pyright: ignore[reportReturnType] - it does not narrow `in`
    if not step.isdecimal():
        raise typer.BadParameter(f"a step must be a whole number, best or latest, got {step!r}")
    return int(step)


def match_record_files(files: Sequence[str]) -> list[Path]:
    """Return the files that paths and patterns match; DataCommandError if there are none."""
    from ftrain.formats.records.files import match_files

    try:
        found = match_files(files)
    except (OSError, ValueError) as error:
        if is_transient(error):
            raise
        raise DataCommandError(f"{error}") from None
    for path in found:
        if path.exists() and not path.is_file():
            raise DataCommandError(
                f"{path} is a pipe or a device, expected a regular file; save it to one first"
            )
    return found
