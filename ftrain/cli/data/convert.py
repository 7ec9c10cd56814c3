"""ftrain data convert SOURCE... TARGET"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from ftrain.cli.data.arguments import MaxRecordBytes, match
from ftrain.cli.data.errors import DataCommandError
from ftrain.cli.data.kinds import Kind, source_kind, suffix_compression, target_kind
from ftrain.cli.tables import show_bytes

Compression = Literal["gzip", "zlib"]
_PATHS = (
    "Files or patterns, then the file to write. The suffixes say what they are: .csv, .tsv, .jsonl, .npz, or "
    ".tfrecord, which .gz or .zlib may follow."
)


def convert(
    paths: Annotated[list[str], typer.Argument(metavar="SOURCE... TARGET", help=_PATHS)],
    shard_records: Annotated[
        int | None,
        typer.Option(
            min=1, help="Write TARGET in shards of so many records, TARGET-00000-of-00003."
        ),
    ] = None,
    compression: Annotated[
        Compression | None,
        typer.Option(help="Compress records; if not given, TARGET's suffix says so."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace TARGET if it is there already.")
    ] = False,
    max_record_bytes: MaxRecordBytes = None,
) -> None:
    """Convert tables to records of Examples and back, or records to records: compressed, plain, or in other shards."""
    from ftrain.cli.data.conversion import to_records, to_table
    from ftrain.cli.data.progress import interruptible

    if len(paths) < 2:
        raise typer.BadParameter(f"wanted SOURCE... TARGET, got only {paths[0]}")
    sources, target = match(paths[:-1]), Path(paths[-1])
    _check_place(target)
    kind, source = target_kind(target), _common_kind(sources)
    if "records" not in (kind, source):
        raise DataCommandError(
            f"{sources[0]} is {source} and {target} is {kind}, but tables become records and records tables; "
            "convert to .tfrecord first, and that to the other"
        )
    _check_target(sources, target, sharded=shard_records is not None)
    if kind != "records" and (shard_records or compression):
        option = "--shard-records" if shard_records else "--compression"
        raise DataCommandError(f"{option} is for files of records; {target} is {kind}")
    with interruptible():
        if kind == "records":
            packing = _packing(target, compression)
            count, written = to_records(
                sources, source, target, packing, shard_records, overwrite, max_record_bytes
            )
        else:
            count, written = to_table(sources, target, kind, overwrite, max_record_bytes), [target]
    size = show_bytes(sum(path.stat().st_size for path in written))
    names = f"{written[0]}" if len(written) == 1 else f"{written[0]} to {written[-1].name}"
    typer.echo(f"{names}: {count:,} {'record' if count == 1 else 'records'}, {size}")


def _check_place(target: Path) -> None:
    if target.is_dir():
        raise DataCommandError(f"{target} is a directory; give the name of a file in it")
    if target.parent.exists() and not target.parent.is_dir():
        raise DataCommandError(
            f"{target} cannot be written: {target.parent} is a file, not a directory"
        )


def _common_kind(sources: Sequence[Path]) -> Kind:
    first = source_kind(sources[0])
    for path in sources[1:]:
        if (kind := source_kind(path)) != first:
            raise DataCommandError(
                f"{sources[0]} is {first} and {path} is {kind}; convert one kind at a time"
            )
    return first


def _check_target(sources: Sequence[Path], target: Path, *, sharded: bool) -> None:
    """What is read must not be replaced by what is written, also if that are shards."""
    from ftrain.cli.data.record_files import shard_pattern

    pattern = shard_pattern(target)
    for path in sources:
        in_place = path.resolve().parent == target.resolve().parent
        is_shard = sharded and in_place and pattern.fullmatch(path.name)
        if is_shard or (target.exists() and path.samefile(target)):
            raise DataCommandError(
                f"{path} would be read and, as {target}, be written; choose another name"
            )


def _packing(target: Path, compression: Compression | None) -> Literal["GZIP", "ZLIB"] | None:
    by_suffix = suffix_compression(target)
    asked: dict[str, Literal["GZIP", "ZLIB"]] = {"gzip": "GZIP", "zlib": "ZLIB"}
    if compression is None:
        return by_suffix
    if by_suffix not in (None, asked[compression]):
        raise DataCommandError(
            f"{target} would be {by_suffix} by its suffix, and --compression says {compression}"
        )
    return asked[compression]
