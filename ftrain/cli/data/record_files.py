"""Files of records: as bytes, as rows of features, and written from either."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ftrain.cli.data.errors import DataCommandError, named, told_with
from ftrain.cli.data.progress import Bar
from ftrain.cli.data.reading import follow_records
from ftrain.cli.data.text_files import Row
from ftrain.formats.examples.guessing import record_kind
from ftrain.formats.examples.messages import decode_example, encode_example
from ftrain.formats.records.writing import RecordWriter


def read_bytes(
    paths: Sequence[Path], verb: str = "converting", max_record_bytes: int | None = None
) -> Iterator[tuple[str, bytes]]:
    """Every record of files, with its place."""
    with Bar(verb, paths) as bar:
        for path in paths:
            with told_with(
                f"`ftrain data verify {shlex.quote(str(path))}` tells what is damaged in it and what is not"
            ):
                for number, record in enumerate(
                    follow_records(bar, path, max_record_bytes=max_record_bytes)
                ):
                    yield f"{path}: record {number}", record


def read_examples(
    paths: Sequence[Path], verb: str = "converting", max_record_bytes: int | None = None
) -> Iterator[Row]:
    """Every record of files as its features; an error for one that is no Example."""
    for where, record in read_bytes(paths, verb, max_record_bytes):
        kind = record_kind(record)
        if kind != "example":
            found = "is a SequenceExample" if kind == "sequence" else "is no Example"
            raise DataCommandError(
                f"{where} {found}, and only Examples become tables; .tfrecord keeps it as it is"
            )
        yield Row(where, decode_example(record))


def encode_rows(rows: Iterable[Row]) -> Iterator[bytes]:
    for where, features in rows:
        try:
            yield encode_example(features)
        except (TypeError, ValueError) as error:
            raise DataCommandError(f"{where}: {error}") from None


def write_records(
    target: Path,
    records: Iterable[bytes],
    compression: Literal["GZIP", "ZLIB"] | None,
    shard_records: int | None,
    overwrite: bool,
) -> tuple[int, list[Path]]:
    """Writes records; how many, and to which files."""
    what = f"{target}" if shard_records is None else f"shards of {target}"
    with named(target):
        with _told_if_there(what):
            writer = RecordWriter(
                target, compression=compression, shard_records=shard_records, overwrite=overwrite
            )
        try:
            count = sum(1 for _ in map(writer.write, records))
            writer.close()
        except BaseException:
            writer.discard()
            raise
    return count, writer.paths


def shard_pattern(target: Path) -> re.Pattern:
    """The names of the files that `target` is written to, whether or not it is sharded."""
    # The number of a shard stands before the suffixes, as many as are taken to be such.
    parts = (re.escape(part) for part in target.name.split("."))
    return re.compile(r"(-\d{5,}(-of-\d{5,})?)?\.".join(parts))


@contextmanager
def _told_if_there(what: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        if (
            error.filename is not None
        ):  # not of the writer's check, but of a directory that is a file
            raise
        raise DataCommandError(
            f"{what}: already there; choose another name, or --overwrite"
        ) from None
