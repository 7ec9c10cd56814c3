"""ftrain data: show, verify, index and convert record files."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from ftrain.cli.arguments import DataCommandError, Files, MaxRecordBytes, match_record_files
from ftrain.cli.data_convert import convert
from ftrain.cli.data_schema import print_guess, print_record
from ftrain.cli.output import ReadProgress, interruptible, print_table, show_bytes

if TYPE_CHECKING:
    import numpy as np

    from ftrain.formats.records.encoding import DamagedRecordError

_SAMPLE = 1000  # records to guess the features from
_SAMPLE_BYTES = 1 << 24  # and their bytes
_MAX_DAMAGES = 20  # shown of a file, unless --all


def show(
    files: Files,
    examples: Annotated[
        int, typer.Option(min=0, max=_SAMPLE, help="Number of records to show, from the first.")
    ] = 3,
) -> None:
    """Show the number of records in FILES, their features, a spec to parse them, and the first."""
    from ftrain.formats.examples.guessing import guess_schema

    paths = match_record_files(files)
    with interruptible(), ReadProgress("reading", paths) as progress:
        surveys = [
            _survey(progress, path, _share(number, len(paths))) for number, path in enumerate(paths)
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


def _survey(progress: ReadProgress, path: Path, share: int) -> _Survey:
    from ftrain.formats.conversion import follow_records, name_file
    from ftrain.formats.records.encoding import detect_compression
    from ftrain.formats.records.reading import read_records

    compression = detect_compression(path)
    limit = _SAMPLE_BYTES * share // _SAMPLE
    with name_file(path), _explain_damage(path):
        if compression:
            sample, lengths = _count(follow_records(progress, path, verify=False), share, limit)
        else:
            sample = _sample(read_records(path), share, limit)
            lengths = _plain_lengths(path)
            progress.finish(path)
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


def verify(
    files: Files,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help=f"List all damage, not only the first {_MAX_DAMAGES} places of a file."
        ),
    ] = False,
    max_record_bytes: MaxRecordBytes = None,
) -> None:
    """Read every record of FILES and verify all checksums; exit with 1 if one is damaged."""
    from ftrain.formats.conversion import follow_records

    paths = match_record_files(files)
    good = 0  # records
    damaged = 0  # files
    places = 0
    with interruptible(), ReadProgress("verifying", paths) as progress:
        for path in paths:
            damages: list[DamagedRecordError] = []
            records = follow_records(
                progress, path, on_damage="skip", damages=damages, max_record_bytes=max_record_bytes
            )
            count = sum(1 for _ in records)
            good += count
            damaged += bool(damages)
            places += len(damages)
            state = f"DAMAGED in {_number(len(damages), 'place')}" if damages else "good"
            typer.echo(
                f"{path}: {_number(count, 'record')}, {show_bytes(path.stat().st_size)}, {state}"
            )
            _print_damages(damages, len(damages) if everything else _MAX_DAMAGES)
    if damaged or len(paths) > 1:
        ending = (
            f"damage in {_number(places, 'place')} of {_number(damaged, 'file')}"
            if damaged
            else "no damage"
        )
        typer.echo(f"{_number(good, 'good record')} in {_number(len(paths), 'file')}, {ending}")
    raise typer.Exit(1 if damaged else 0)


def _print_damages(damages: "list[DamagedRecordError]", most: int) -> None:
    for damage in damages[:most]:
        where = (
            f"byte {damage.offset:,}{' of the uncompressed data' if damage.uncompressed else ''}"
        )
        typer.echo(f"  record {damage.number:,} at {where}: {damage.reason}")
    if len(damages) > most:
        typer.echo(f"  and {len(damages) - most:,} more, listed with --all")


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def index(
    files: Files,
    skip_damaged: Annotated[
        bool,
        typer.Option(
            "--skip-damaged", help="Read everything, and leave damaged records out of the index."
        ),
    ] = False,
) -> None:
    """Write the index of each plain record file beside it, as FILE.index, for random access."""

    paths = match_record_files(files)
    for path in paths:
        _refuse_compressed(path)
    with interruptible(), ReadProgress("indexing", paths) as progress:
        for path in paths:
            typer.echo(_index(path, "skip" if skip_damaged else "raise"))
            progress.finish(path)


def _index(path: Path, on_damage: Literal["raise", "skip"]) -> str:
    """Write the index of a file; return a line about it."""
    from ftrain.formats.conversion import advise, name_file
    from ftrain.formats.records.index import index_records, load_sidecar, sidecar_path

    with name_file(path), advise("--skip-damaged leaves damaged records out of the index"):
        fresh = load_sidecar(path, os.stat(path), on_damage) is not None
        found = index_records(path, on_damage=on_damage)
    sidecar = sidecar_path(path)
    if not fresh and load_sidecar(path, os.stat(path), on_damage) is None:
        raise DataCommandError(
            f"{sidecar} could not be written; check that its directory is writable, "
            f"and that {path} is not being changed"
        )
    left_out = f", {len(found.damages):,} damaged left out" if found.damages else ""
    state = "was up to date" if fresh else f"written, {show_bytes(sidecar.stat().st_size)}"
    size = show_bytes(found.size)
    return f"{path}: {len(found):,} records{left_out}, {size}; {sidecar.name} {state}"


def _refuse_compressed(path: Path) -> None:
    from ftrain.formats.records.encoding import detect_compression, plain_name

    if compression := detect_compression(path):
        command = shlex.join(["ftrain", "data", "convert", str(path), str(plain_name(path))])
        raise DataCommandError(
            f"{path} is compressed ({compression}), and only a plain file has random access\n"
            f"make a plain one with: {command}"
        )


app = typer.Typer(
    help="Show, verify, index and convert record files.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command()(show)
app.command()(verify)
app.command()(index)
app.command()(convert)
