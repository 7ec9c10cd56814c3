"""Conversions between tables and records; what they write takes its name once it is complete."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ftrain.cli.data.csv_files import find_columns, read_csv, write_csv
from ftrain.cli.data.errors import DataCommandError, named
from ftrain.cli.data.jsonl_files import find_single, read_jsonl, write_jsonl
from ftrain.cli.data.kinds import Kind
from ftrain.cli.data.npz_files import read_npz, write_npz
from ftrain.cli.data.record_files import encode_rows, read_bytes, read_examples, write_records
from ftrain.cli.data.text_files import MAX_LINE_BYTES, Row
from ftrain.formats.records.framing import MAX_RECORD_BYTES


def to_records(
    sources: Sequence[Path],
    kind: Kind,
    target: Path,
    compression: Literal["GZIP", "ZLIB"] | None,
    shard_records: int | None,
    overwrite: bool,
    limit: int | None = None,
) -> tuple[int, list[Path]]:
    """Writes tables, or records as they are, to records; how many, and to which files.

    `limit` are the bytes that a record, a row or a line may have; None is the default of each kind of file.
    """
    as_they_are = (record for _, record in read_bytes(sources, max_record_bytes=limit))
    records = as_they_are if kind == "records" else encode_rows(_rows(sources, kind, limit))
    return write_records(target, records, compression, shard_records, overwrite)


def to_table(
    sources: Sequence[Path], target: Path, kind: Kind, overwrite: bool, limit: int | None = None
) -> int:
    """Writes records to a table; how many. What a file as a whole decides takes a reading of its own, before."""
    if target.exists() and not overwrite:
        raise DataCommandError(f"{target}: already there; choose another name, or --overwrite")
    if kind == "npz":
        with _replacing(target) as path:
            return write_npz(path, read_examples(sources, max_record_bytes=limit))
    if kind == "jsonl":
        single = find_single(read_examples(sources, "looking at", limit))
        with _replacing(target) as path:
            return write_jsonl(path, single, read_examples(sources, max_record_bytes=limit))
    names = find_columns(read_examples(sources, "looking at", limit))
    with _replacing(target) as path:
        return write_csv(
            path,
            names,
            read_examples(sources, max_record_bytes=limit),
            "\t" if kind == "tsv" else ",",
        )


def _rows(sources: Sequence[Path], kind: Kind, limit: int | None) -> Iterator[Row]:
    if kind == "npz":
        return read_npz(sources, limit or MAX_RECORD_BYTES)
    if kind == "jsonl":
        return read_jsonl(sources, limit or MAX_LINE_BYTES)
    return read_csv(sources, "\t" if kind == "tsv" else ",", limit or MAX_LINE_BYTES)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A name beside `target`, which takes its place once it is complete."""
    with named(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f"{target.name}.{uuid.uuid4().hex}.writing")
        try:
            yield beside
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
