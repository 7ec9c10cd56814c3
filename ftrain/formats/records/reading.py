"""Records: TensorFlow's framing, length + checksum + bytes + checksum, as in TFRecord and event files.

for record in read_records("train.tfrecord.gz", on_damage="skip"):
    ...
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import google_crc32c

from ftrain.formats.records.compression import ByteStream, Compression, check_compression
from ftrain.formats.records.framing import (
    DATA_CUT,
    DATA_WRONG,
    FOOTER,
    FRAME,
    HEADER,
    HEADER_CUT,
    HEADER_WRONG,
    DamagedRecordError,
    frame_record,
    parse_header,
)
from ftrain.formats.records.resync import Window, find_record
from ftrain.paths import expanded

__all__ = [
    "DamagedRecordError",
    "OnDamage",
    "RecordScan",
    "check_on_damage",
    "frame_record",
    "raise_damage",
    "read_records",
]

OnDamage = Literal["raise", "skip"]
_KNOWN = 4096  # headers remembered, as many files have few different lengths


def read_records(
    path: str | Path,
    *,
    compression: Compression = "auto",
    verify: bool = True,
    on_damage: OnDamage = "raise",
    damages: list[DamagedRecordError] | None = None,
) -> Iterator[bytes]:
    """Every record of a file, checksums verified; damage is an error that says where.

    `on_damage="skip"` goes on with the next whole record and appends what it left out to `damages`, or warns at the end
    if there is no such list. As nobody knows how many records a damaged region held, it counts as one in the numbers
    that follow. `verify=False` leaves the checksums of the data alone; those of the lengths are always verified.
    """
    check_compression(compression)
    check_on_damage(on_damage)
    return _read(expanded(path), compression, verify, on_damage, damages)


def check_on_damage(on_damage: object) -> None:
    if on_damage not in ("raise", "skip"):
        raise ValueError(f'on_damage is {on_damage!r}; it must be "raise" or "skip"')


class RecordScan:
    """Walks the records of a stream as (offset, data); `report` is told of damage, and may raise."""

    def __init__(
        self, path: str | Path, stream: ByteStream, report: Callable[[DamagedRecordError], None], *, verify: bool = True
    ):
        self._path, self._window, self._report, self._verify = path, Window(stream), report, verify
        self._uncompressed = stream.compression is not None
        self._known: dict[bytes, int] = {}
        self._damages, self._damaged_after = 0, -1

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        data, at, delivered, offset = b"", 0, 0, 0
        known, verify, crc_of, crc_at = self._known, self._verify, google_crc32c.value, FOOTER.unpack_from
        while True:
            header = data[at : at + 12]
            length = known.get(header)
            if length is None:
                length = self._learn(header)
            end = at + length + 16
            if length < 0 or end > len(data):
                length = self._next_frame(at, delivered)
                if length is None:
                    return
                data, offset, at, end = self._window.data, self._window.offset, 0, length + 16
            record = data[at + 12 : end - 4]
            crc = crc_of(record) if verify else 0
            # The mask is written out here: a call for each record would take longer than its checksum.
            if verify and crc_at(data, end - 4)[0] != ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF:
                self._damaged(offset + at, delivered, DATA_WRONG)
                place = self._beyond(at, end - at)
                if place is None:
                    return
                data, offset, at = self._window.data, self._window.offset, place
            else:
                delivered += 1
                yield offset + at, record
                at = end

    def _learn(self, header: bytes) -> int:
        """The length in a header, -1 if it is damaged or not all there."""
        length = parse_header(header)
        if length is None:
            return -1
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[header] = length
        return length

    def _next_frame(self, at: int, delivered: int) -> int | None:
        """Moves the window to the frame at `at`, or beyond damage there; its length, None if no whole frame is left."""
        window = self._window
        if not window.move(at, HEADER.size):
            if window.data or window.failure:
                self._damaged(window.offset, delivered, window.failure or HEADER_CUT)
            return None
        length = parse_header(window.data[: HEADER.size])
        if length is None:
            # What follows a damaged record without a record between them is one region with it.
            if self._damaged_after != delivered:
                self._damaged(window.offset, delivered, HEADER_WRONG)
            return self._next_frame(0, delivered) if find_record(window) else None
        if not window.move(0, length + FRAME):
            self._damaged(window.offset, delivered, window.failure or DATA_CUT)
            # A writer may have died within a record, and another have gone on behind it.
            return self._next_frame(0, delivered) if not window.failure and find_record(window) else None
        return length

    def _beyond(self, at: int, size: int) -> int | None:
        """Moves the window to a frame with damaged data at `at`; where in it to go on, None if nothing is left."""
        window = self._window
        if window.move(at, size + HEADER.size):
            is_followed = parse_header(window.data[size : size + HEADER.size]) is not None
        else:
            is_followed = len(window.data) == size  # the file ends here
        if is_followed:
            return size
        # It may have been cut, and others written behind it, of which its length claims a part.
        return 0 if find_record(window) else None

    def _damaged(self, offset: int, delivered: int, reason: str) -> None:
        number = delivered + self._damages
        self._damages, self._damaged_after = self._damages + 1, delivered
        self._report(DamagedRecordError(self._path, number, offset, reason, uncompressed=self._uncompressed))


def _read(
    path: str | Path,
    compression: Compression,
    verify: bool,
    on_damage: OnDamage,
    damages: list[DamagedRecordError] | None,
) -> Iterator[bytes]:
    unseen: list[DamagedRecordError] = []
    report = raise_damage if on_damage == "raise" else (unseen if damages is None else damages).append
    with ByteStream(path, compression) as stream:
        for _, data in RecordScan(path, stream, report, verify=verify):
            yield data
    if unseen:
        warnings.warn(f"{len(unseen)} damaged regions were left out of {path}; the first: {unseen[0]}", stacklevel=2)


def raise_damage(damage: DamagedRecordError) -> None:
    raise damage
