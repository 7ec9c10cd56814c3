"""ftrain data show FILES..."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ftrain.cli.data.arguments import DataCommandError, Files, match
from ftrain.cli.tables import print_table, show_bytes

if TYPE_CHECKING:
    import numpy as np

    from ftrain.cli.data.progress import Bar

_SAMPLE = 1000  # records to guess the features from
_SAMPLE_BYTES = 1 << 24  # and their bytes


def show(
    files: Files,
    examples: Annotated[
        int, typer.Option(min=0, max=_SAMPLE, help="Number of records to show, from the first.")
    ] = 3,
) -> None:
    """Show the number of records in FILES, their features, a spec to parse them, and the first."""
    from ftrain.cli.data.progress import Bar, interruptible
    from ftrain.cli.data.schema_text import print_guess, print_record
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
    """Return how many records of a file belong to the sample, evenly over the files."""
    return _SAMPLE * (number + 1) // files - _SAMPLE * number // files


def _survey(bar: "Bar", path: Path, share: int) -> _Survey:
    from ftrain.formats.conversion import follow_records, name_file
    from ftrain.formats.records.encoding import detect_compression
    from ftrain.formats.records.reading import read_records

    compression = detect_compression(path)
    limit = _SAMPLE_BYTES * share // _SAMPLE
    with name_file(path), _explain_damage(path):
        if compression:
            sample, lengths = _count(follow_records(bar, path, verify=False), share, limit)
        else:
            sample = _sample(read_records(path), share, limit)
            lengths = _plain_lengths(path)
            bar.finish(path)
    return _Survey(path, compression, lengths, sample)


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Advise what to do about damage; a file that starts with it is perhaps not a record file."""
    from ftrain.formats.conversion import advise, verify_advice
    from ftrain.formats.records.encoding import HEADER_CUT, HEADER_WRONG, DamagedRecordError

    with advise(verify_advice(path)):
        try:
            yield
        except DamagedRecordError as error:
            if error.offset == 0 and error.reason in (HEADER_WRONG, HEADER_CUT):
                raise DataCommandError(
                    f"{path} is not a record file, or damaged from its first byte on\n"
                    f"`ftrain data verify {shlex.quote(str(path))}` searches for records in it"
                ) from None
            raise


def _sample(records: Iterator[bytes], share: int, limit: int) -> list[bytes]:
    """Return the first `share` records, or fewer if they exceed `limit` bytes, at least one."""
    sample = []
    size = 0
    for record in islice(records, share):
        sample.append(record)
        size += len(record)
        if size > limit:
            break
    return sample


def _count(records: Iterator[bytes], share: int, limit: int) -> "tuple[list[bytes], np.ndarray]":
    """Return a sample, and the lengths of all records."""
    import numpy as np

    sample = _sample(records, share, limit)
    first = np.fromiter(map(len, sample), np.int64, len(sample))
    return sample, np.concatenate([first, np.fromiter(map(len, records), np.int64)])


def _plain_lengths(path: Path) -> "np.ndarray":
    """Return the lengths of all records of a plain file, from its sidecar or its headers."""
    from ftrain.formats.records.index import index_records, load_sidecar

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
