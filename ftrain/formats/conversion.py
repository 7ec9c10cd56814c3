"""Conversion between tables and records; an output file appears once it is complete."""

import re
import shlex
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ftrain.formats.examples.guessing import record_kind
from ftrain.formats.examples.messages import decode_example, encode_example
from ftrain.formats.numpy_files import read_npz, write_npz
from ftrain.formats.records.encoding import (
    FRAME,
    HEADER,
    MAX_RECORD_BYTES,
    RECORD_NAME,
    ByteStream,
    Codec,
    DamagedRecordError,
    StreamError,
    detect_compression,
    parse_header,
)
from ftrain.formats.records.reading import OnDamage, read_records
from ftrain.formats.records.writing import RecordWriter
from ftrain.formats.tables import (
    MAX_LINE_BYTES,
    Progress,
    Row,
    ShowProgress,
    TableError,
    hide_progress,
)
from ftrain.formats.text_tables import (
    find_columns,
    find_single,
    read_csv,
    read_jsonl,
    write_csv,
    write_jsonl,
)
from ftrain.storage import is_transient, replacing

Kind = Literal["csv", "tsv", "jsonl", "npz", "records"]

_KNOWN = "known suffixes are .csv, .tsv, .jsonl, .npz, and .tfrecord, also followed by .gz or .zlib"
_TABLES: dict[str, Kind] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".npz": "npz",
}


def target_kind(path: Path) -> Kind:
    """Return the kind of a file to write, by its suffix."""
    kind = _kind_of_name(path)
    if kind is None:
        raise TableError(f"{path}: its suffix is unknown; {_KNOWN}")
    return kind


def source_kind(path: Path) -> Kind:
    """Return the kind of a file to read, by its suffix, or by its first bytes for records."""
    kind = _kind_of_name(path) or ("records" if _starts_with_record(path) else None)
    if kind is None:
        raise TableError(
            f"{path}: its suffix is unknown, and it does not begin with a record; {_KNOWN}"
        )
    return kind


def shard_pattern(target: Path) -> re.Pattern:
    """Return a pattern of the file names of `target`, sharded or not."""
    # The number of a shard is before the suffixes, which may start at any dot.
    parts = (re.escape(part) for part in target.name.split("."))
    return re.compile(r"(-\d{5,}(-of-\d{5,})?)?\.".join(parts))


def to_records(
    sources: Sequence[Path],
    kind: Kind,
    target: Path,
    *,
    compression: Codec | None = None,
    shard_records: int | None = None,
    overwrite: bool = False,
    limit: int | None = None,
    show: ShowProgress = hide_progress,
) -> tuple[int, list[Path]]:
    """Convert tables to records, or copy records; return their number and the files.

    `limit` is the maximum size in bytes of a record, a row or a line; None is the default of the
    kind. FileExistsError if the target exists and `overwrite` is False.
    """
    if kind == "records":
        records = (record for _, record in _read_bytes(sources, "converting", limit, show))
    else:
        records = encode_rows(_read_rows(sources, kind, limit, show))
    writer = None
    with name_file(target):
        try:
            writer = RecordWriter(
                target, compression=compression, shard_records=shard_records, overwrite=overwrite
            )
            count = sum(1 for _ in map(writer.write, records))
            writer.close()
        except BaseException:
            if writer is not None:
                writer.discard()
            raise
    return count, writer.paths


def to_table(
    sources: Sequence[Path],
    target: Path,
    kind: Kind,
    *,
    limit: int | None = None,
    show: ShowProgress = hide_progress,
) -> int:
    """Write the Examples of record files to one table, replacing it; return the number of rows.

    A first pass finds the columns of .csv files, and the single-valued features of .jsonl files.
    """
    if kind == "npz":
        with _replace(target) as path:
            return write_npz(path, _read_examples(sources, "converting", limit, show))
    first_pass = _read_examples(sources, "scanning", limit, show)
    if kind == "jsonl":
        single = find_single(first_pass)
        with _replace(target) as path:
            return write_jsonl(path, single, _read_examples(sources, "converting", limit, show))
    names = find_columns(first_pass)
    with _replace(target) as path:
        rows = _read_examples(sources, "converting", limit, show)
        return write_csv(path, names, rows, _delimiter(kind))


def encode_rows(rows: Iterable[Row]) -> Iterator[bytes]:
    """Yield each row as the bytes of an Example."""
    for where, features in rows:
        try:
            yield encode_example(features)
        except (TypeError, ValueError) as error:
            raise TableError(f"{where}: {error}") from None


def follow_records(
    progress: Progress,
    path: Path,
    *,
    verify: bool = True,
    on_damage: OnDamage = "raise",
    damages: list[DamagedRecordError] | None = None,
    max_record_bytes: int | None = None,
) -> Iterator[bytes]:
    """Yield every record of a file as `read_records` does, and report the progress."""
    # A compressed file counts when it ends: the bytes of one record are unknown.
    share = 0 if detect_compression(path) else 1
    limit = max_record_bytes or MAX_RECORD_BYTES
    records = read_records(
        path, verify=verify, on_damage=on_damage, damages=damages, max_record_bytes=limit
    )
    with name_file(path):
        yield from progress.follow(path, records, lambda record: share * (len(record) + FRAME))


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Add the file to errors of the operating system without one, such as a full disk."""
    try:
        yield
    except OSError as error:
        has_name = error.filename is not None or isinstance(error, FileExistsError)
        if has_name or is_transient(error):
            raise
        raise TableError(f"{path}: {error.strerror or error}") from None


@contextmanager
def advise(advice: str) -> Iterator[None]:
    """Add a line of advice to the error of a damaged record."""
    try:
        yield
    except DamagedRecordError as error:
        error.add_note(advice)
        raise


def verify_advice(path: Path) -> str:
    """Return the advice for a damaged record file."""
    return f"`ftrain data verify {shlex.quote(str(path))}` lists what is damaged in it"


def _read_bytes(
    paths: Sequence[Path], verb: str, limit: int | None, show: ShowProgress
) -> Iterator[tuple[str, bytes]]:
    """Yield every record of files, with its place."""
    with show(verb, paths) as progress:
        for path in paths:
            with advise(verify_advice(path)):
                records = follow_records(progress, path, max_record_bytes=limit)
                for number, record in enumerate(records):
                    yield f"{path}: record {number}", record


def _read_examples(
    paths: Sequence[Path], verb: str, limit: int | None, show: ShowProgress
) -> Iterator[Row]:
    """Yield the features of every record; TableError for records that are not Examples."""
    for where, record in _read_bytes(paths, verb, limit, show):
        kind = record_kind(record)
        if kind != "example":
            found = "is a SequenceExample" if kind == "sequence" else "is not an Example"
            raise TableError(
                f"{where} {found}, and only Examples can be converted to tables; use .tfrecord"
            )
        yield Row(where, decode_example(record))


def _read_rows(
    sources: Sequence[Path], kind: Kind, limit: int | None, show: ShowProgress
) -> Iterator[Row]:
    if kind == "npz":
        return read_npz(sources, limit or MAX_RECORD_BYTES, show)
    if kind == "jsonl":
        return read_jsonl(sources, limit or MAX_LINE_BYTES, show)
    return read_csv(sources, _delimiter(kind), limit or MAX_LINE_BYTES, show)


def _delimiter(kind: Kind) -> str:
    return "\t" if kind == "tsv" else ","


@contextmanager
def _replace(target: Path) -> Iterator[Path]:
    """Yield a temporary name; the file there replaces `target` once it is complete."""
    with name_file(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.writing")
        with replacing(target, temporary):
            yield temporary


def _kind_of_name(path: Path) -> Kind | None:
    if found := _TABLES.get(path.suffix.lower()):
        return found
    return "records" if RECORD_NAME.search(path.name) else None


def _starts_with_record(path: Path) -> bool:
    try:
        with ByteStream(path) as stream:
            return parse_header(stream.read(1 << 16)[: HEADER.size]) is not None
    except StreamError:
        return False
