"""ftrain data show FILES..."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ftrain.cli.data.arguments import Files, match
from ftrain.cli.tables import print_table, show_bytes

if TYPE_CHECKING:
    import numpy as np

    from ftrain.cli.data.progress import Bar

_SAMPLE = 1000  # records to guess from
_SAMPLE_BYTES = 1 << 24


def show(
    files: Files,
    examples: Annotated[
        int, typer.Option(min=0, max=_SAMPLE, help="How many of the first records to show.")
    ] = 3,
) -> None:
    """Show what FILES hold: how many records, which features they have, a spec that parses them, and the first ones."""
    from ftrain.cli.data.guesses import print_guess, print_record
    from ftrain.cli.data.progress import Bar, interruptible
    from ftrain.formats.examples.guessing import guess_schema

    paths = match(files)
    with interruptible(), Bar("reading", paths) as bar:
        surveys = [
            _survey(bar, path, _share(number, len(paths))) for number, path in enumerate(paths)
        ]
    _print_files(surveys)
    sample = [record for survey in surveys for record in survey.sample]
    if not sample:
        typer.echo("\nthere are no records")
        return
    guess = guess_schema(sample)
    print_guess(guess)
    first = (
        (survey.path, number, record)
        for survey in surveys
        for number, record in enumerate(survey.sample)
    )
    for path, number, record in islice(first, examples):
        print_record(f"{path}: record {number}", record, guess)


class _Survey(NamedTuple):
    path: Path
    compression: str | None
    lengths: "np.ndarray"
    sample: list[bytes]


def _share(number: int, files: int) -> int:
    """How many records of a file belong to the sample, such that each file gives some if they are not too many."""
    return _SAMPLE * (number + 1) // files - _SAMPLE * number // files


def _survey(bar: "Bar", path: Path, share: int) -> _Survey:
    from ftrain.cli.data.errors import named
    from ftrain.cli.data.reading import follow_records
    from ftrain.formats.records.compression import detect_compression
    from ftrain.formats.records.reading import read_records

    compression = detect_compression(path)
    limit = _SAMPLE_BYTES * share // _SAMPLE
    with named(path), _hinting(path):
        if compression:
            sample, lengths = _count(follow_records(bar, path, verify=False), share, limit)
        else:
            sample, lengths = _sample(read_records(path), share, limit), _plain_lengths(path)
            bar.finish(path)
    return _Survey(path, compression, lengths, sample)


@contextmanager
def _hinting(path: Path) -> Iterator[None]:
    """Tells a file of something else from one that is damaged, as far as one can."""
    from ftrain.cli.data.errors import DataCommandError, told_with
    from ftrain.formats.records.framing import HEADER_CUT, HEADER_WRONG, DamagedRecordError

    with told_with(
        f"`ftrain data verify {shlex.quote(str(path))}` tells what is damaged in it and what is not"
    ):
        try:
            yield
        except DamagedRecordError as error:
            if error.offset == 0 and error.reason in (HEADER_WRONG, HEADER_CUT):
                message = f"{path} is no file of records, or damaged from its first byte on"
                raise DataCommandError(
                    f"{message}\n`ftrain data verify {shlex.quote(str(path))}` looks for records in it"
                ) from None
            raise


def _sample(records: Iterator[bytes], share: int, limit: int) -> list[bytes]:
    """The first `share` records, fewer if they have more bytes than `limit`; but one at least."""
    sample, size = [], 0
    for record in islice(records, share):
        sample.append(record)
        size += len(record)
        if size > limit:
            break
    return sample


def _count(records: Iterator[bytes], share: int, limit: int) -> "tuple[list[bytes], np.ndarray]":
    """A sample, and the lengths of all records."""
    import numpy as np

    sample = _sample(records, share, limit)
    first = np.fromiter(map(len, sample), np.int64, len(sample))
    return sample, np.concatenate([first, np.fromiter(map(len, records), np.int64)])


def _plain_lengths(path: Path) -> "np.ndarray":
    """The lengths of all records of a plain file, which their headers tell; an index beside it is used, not made."""
    from ftrain.formats.records.indexing import index_records
    from ftrain.formats.records.sidecar import load_sidecar

    frames = load_sidecar(path, os.stat(path), "raise")
    return index_records(path, sidecar=False).lengths if frames is None else frames.lengths


def _print_files(surveys: Sequence[_Survey]) -> None:
    import numpy as np
    from rich.table import Table

    table = Table(box=None)
    for column in ("file", "compression", "records", "size", "shortest", "mean", "longest"):
        table.add_column(
            column,
            justify="left" if column in ("file", "compression") else "right",
            overflow="fold",
        )
    sizes = [survey.path.stat().st_size for survey in surveys]
    for survey, size in zip(surveys, sizes, strict=True):
        table.add_row(
            f"{survey.path}", survey.compression or "none", *_figures(survey.lengths, size)
        )
    if len(surveys) > 1:
        lengths = np.concatenate([survey.lengths for survey in surveys])
        table.add_row(f"{len(surveys):,} files", "", *_figures(lengths, sum(sizes)))
    print_table(table)


def _figures(lengths: "np.ndarray", size: int) -> list[str]:
    spread = [lengths.min(), lengths.mean(), lengths.max()] if len(lengths) else []
    return [
        f"{len(lengths):,}",
        show_bytes(size),
        *(show_bytes(float(length)) for length in spread),
    ]
