"""The arguments that the commands about data share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ftrain.cli.data.errors import DataCommandError
from ftrain.storage import is_transient

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILES...",
        help="Files of records, plain or compressed, or patterns as 'data/*.tfrecord'.",
    ),
]


MaxRecordBytes = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="BYTES",
        help="Refuse a longer record (256 MiB if not given), or line or row of a table (64 MiB if not given).",
    ),
]


def match(files: Sequence[str]) -> list[Path]:
    """The files that paths and patterns stand for; a DataCommandError if there are none."""
    from ftrain.formats.records.patterns import match_files

    try:
        found = match_files(files)
    except (OSError, ValueError) as error:
        if is_transient(error):
            raise
        raise DataCommandError(f"{error}") from None
    for path in found:
        if path.exists() and not path.is_file():
            raise DataCommandError(
                f"{path} is no regular file, a pipe or a device; save it to a file first"
            )
    return found
