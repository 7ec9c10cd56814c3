"""ftrain data verify FILES..."""

from typing import TYPE_CHECKING, Annotated

import typer

from ftrain.cli.data.arguments import Files, MaxRecordBytes, match
from ftrain.cli.tables import show_bytes

if TYPE_CHECKING:
    from ftrain.formats.records.encoding import DamagedRecordError

_SHOWN = 20


def verify(
    files: Files,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help=f"List all damage, not only the first {_SHOWN} places of a file."
        ),
    ] = False,
    max_record_bytes: MaxRecordBytes = None,
) -> None:
    """Read every record of FILES and verify all checksums; exit with 1 if one is damaged."""
    from ftrain.cli.data.progress import Bar, interruptible
    from ftrain.formats.conversion import follow_records

    paths = match(files)
    good = 0  # records
    damaged = 0  # files
    places = 0
    with interruptible(), Bar("verifying", paths) as bar:
        for path in paths:
            damages: list[DamagedRecordError] = []
            records = follow_records(
                bar, path, on_damage="skip", damages=damages, max_record_bytes=max_record_bytes
            )
            count = sum(1 for _ in records)
            good += count
            damaged += bool(damages)
            places += len(damages)
            state = f"DAMAGED in {_number(len(damages), 'place')}" if damages else "good"
            typer.echo(
                f"{path}: {_number(count, 'record')}, {show_bytes(path.stat().st_size)}, {state}"
            )
            _print_damages(damages, len(damages) if everything else _SHOWN)
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
