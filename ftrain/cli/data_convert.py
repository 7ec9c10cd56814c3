"""ftrain data convert SOURCE... TARGET"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ftrain.cli.arguments import DataCommandError, MaxRecordBytes, match_record_files
from ftrain.cli.output import ReadProgress, interruptible, show_bytes

if TYPE_CHECKING:
    from ftrain.formats.conversion import Kind

Compression = Literal["gzip", "zlib"]
_PATHS = (
    "Files or patterns, then the file to write. Suffixes determine the kinds of files: .csv, .tsv, "
    ".jsonl, .npz, or .tfrecord, which .gz or .zlib may follow."
)


def convert(
    paths: Annotated[list[str], typer.Argument(metavar="SOURCE... TARGET", help=_PATHS)],
    shard_records: Annotated[
        int | None,
        typer.Option(
            min=1, help="Write TARGET in shards of this many records, TARGET-00000-of-00003."
        ),
    ] = None,
    compression: Annotated[
        Compression | None,
        typer.Option(help="Compression of the records; by default from the suffix of TARGET."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing TARGET.")
    ] = False,
    max_record_bytes: MaxRecordBytes = None,
) -> None:
    """Convert tables to records of Examples and back, or records to compressed or sharded ones."""
    from ftrain.formats.conversion import target_kind, to_records, to_table

    if len(paths) < 2:
        raise typer.BadParameter(f"expected SOURCE... TARGET, got only {paths[0]}")
    sources = match_record_files(paths[:-1])
    target = Path(paths[-1])
    _check_directory(target)
    kind = target_kind(target)
    source = _common_kind(sources)
    if "records" not in (kind, source):
        raise DataCommandError(
            f"{sources[0]} is {source} and {target} is {kind}; one of them must be a record "
            f"file: convert to .tfrecord first, then to {kind}"
        )
    _check_target(sources, target, sharded=shard_records is not None)
    if kind != "records" and (shard_records or compression):
        option = "--shard-records" if shard_records else "--compression"
        raise DataCommandError(f"{option} needs a record file as TARGET; {target} is {kind}")
    with interruptible():
        if kind == "records":
            with _refuse_existing(target, sharded=shard_records is not None):
                count, written = to_records(
                    sources,
                    source,
                    target,
                    compression=_compression(target, compression),
                    shard_records=shard_records,
                    overwrite=overwrite,
                    limit=max_record_bytes,
                    show=ReadProgress,
                )
        else:
            if target.exists() and not overwrite:
                raise _exists(f"{target}")
            count = to_table(sources, target, kind, limit=max_record_bytes, show=ReadProgress)
            written = [target]
    size = show_bytes(sum(path.stat().st_size for path in written))
    names = f"{written[0]}" if len(written) == 1 else f"{written[0]} to {written[-1].name}"
    typer.echo(f"{names}: {count:,} {'record' if count == 1 else 'records'}, {size}")


def _check_directory(target: Path) -> None:
    if target.is_dir():
        raise DataCommandError(f"{target} is a directory; pass the name of a file in it")
    if target.parent.exists() and not target.parent.is_dir():
        raise DataCommandError(
            f"{target} cannot be written: {target.parent} is a file, not a directory"
        )


def _common_kind(sources: Sequence[Path]) -> "Kind":
    from ftrain.formats.conversion import source_kind

    first = source_kind(sources[0])
    for path in sources[1:]:
        if (kind := source_kind(path)) != first:
            raise DataCommandError(
                f"{sources[0]} is {first} and {path} is {kind}; convert one kind at a time"
            )
    return first


def _check_target(sources: Sequence[Path], target: Path, *, sharded: bool) -> None:
    """Raise if the target, or one of its shards, would replace a source."""
    from ftrain.formats.conversion import shard_pattern

    pattern = shard_pattern(target)
    for path in sources:
        in_place = path.resolve().parent == target.resolve().parent
        is_shard = sharded and in_place and pattern.fullmatch(path.name)
        if is_shard or (target.exists() and path.samefile(target)):
            raise DataCommandError(
                f"{target} would overwrite the source {path}; choose another name"
            )


def _compression(target: Path, compression: Compression | None) -> Literal["GZIP", "ZLIB"] | None:
    from ftrain.formats.records.encoding import suffix_compression

    by_suffix = suffix_compression(target)
    by_option: dict[str, Literal["GZIP", "ZLIB"]] = {"gzip": "GZIP", "zlib": "ZLIB"}
    if compression is None:
        return by_suffix
    if by_suffix not in (None, by_option[compression]):
        raise DataCommandError(
            f"the suffix of {target} means {by_suffix}, but --compression is {compression}; "
            "change one of them"
        )
    return by_option[compression]


@contextmanager
def _refuse_existing(target: Path, *, sharded: bool) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        if error.filename is not None:  # from the system: a parent directory is a file
            raise
        raise _exists(f"shards of {target}" if sharded else f"{target}") from None


def _exists(what: str) -> DataCommandError:
    return DataCommandError(f"{what}: exists already; choose another name, or pass --overwrite")
