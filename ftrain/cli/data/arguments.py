"""Arguments that the data commands share, and the error for wrong ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ftrain.storage import is_transient

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


def match(files: Sequence[str]) -> list[Path]:
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
                f"{path} is not a regular file, but a pipe or a device; save it to a file first"
            )
    return found
