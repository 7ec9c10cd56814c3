"""Reading records, with a bar to show how far."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ftrain.cli.data.errors import named
from ftrain.cli.data.progress import Bar
from ftrain.formats.records.compression import detect_compression
from ftrain.formats.records.framing import FRAME, MAX_RECORD_BYTES, DamagedRecordError
from ftrain.formats.records.reading import read_records


def follow_records(
    bar: Bar,
    path: Path,
    *,
    verify: bool = True,
    on_damage: Literal["raise", "skip"] = "raise",
    damages: list[DamagedRecordError] | None = None,
    max_record_bytes: int | None = None,
) -> Iterator[bytes]:
    """Every record of a file, as `read_records` gives them."""
    # Nobody knows how many bytes of a compressed file a record takes: the bar moves when all of it has been read.
    share = 0 if detect_compression(path) else 1
    limit = max_record_bytes or MAX_RECORD_BYTES
    records = read_records(
        path, verify=verify, on_damage=on_damage, damages=damages, max_record_bytes=limit
    )
    with named(path):
        yield from bar.follow(path, records, lambda record: share * (len(record) + FRAME))
