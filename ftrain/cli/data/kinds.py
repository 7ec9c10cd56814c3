"""Which kind of file a name stands for."""

import re
from pathlib import Path
from typing import Literal

from ftrain.cli.data.errors import DataCommandError

Kind = Literal["csv", "tsv", "jsonl", "npz", "records"]
KNOWN = "known are .csv, .tsv, .jsonl, .npz, and .tfrecord, also followed by .gz or .zlib"

_TABLES: dict[str, Kind] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".npz": "npz",
}
_RECORDS = re.compile(
    r"\.(tfrecords?|records?)(-\d+-of-\d+)?(\.(gz|gzip|z|zz|zlib))?\Z", re.IGNORECASE
)


def target_kind(path: Path) -> Kind:
    """The kind of a file by its suffix."""
    kind = _by_name(path)
    if kind is None:
        raise DataCommandError(f"{path}: its suffix does not say what it should be; {KNOWN}")
    return kind


def source_kind(path: Path) -> Kind:
    """The kind of a file by its suffix; files of records, which have any name, also by how they begin."""
    kind = _by_name(path) or ("records" if _begins_with_record(path) else None)
    if kind is None:
        raise DataCommandError(
            f"{path}: neither its suffix nor how it begins say what it is; {KNOWN}"
        )
    return kind


def suffix_compression(path: Path) -> Literal["GZIP", "ZLIB"] | None:
    from ftrain.formats.records.compression import SUFFIXES

    return SUFFIXES.get(path.suffix.lower())


def plain_name(path: Path) -> Path:
    """A name for the plain file that a compressed one becomes."""
    plain = path.with_suffix("") if suffix_compression(path) else path.with_suffix(".plain")
    return plain if _RECORDS.search(plain.name) else plain.with_name(f"{plain.name}.tfrecord")


def _by_name(path: Path) -> Kind | None:
    if found := _TABLES.get(path.suffix.lower()):
        return found
    return "records" if _RECORDS.search(path.name) else None


def _begins_with_record(path: Path) -> bool:
    from ftrain.formats.records.compression import ByteStream, StreamError
    from ftrain.formats.records.framing import HEADER, parse_header

    try:
        with ByteStream(path) as stream:
            return parse_header(stream.read(1 << 16)[: HEADER.size]) is not None
    except StreamError:
        return False
