"""Read the records of TFRecord and event files in order.

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
    MAX_RECORD_BYTES,
    TOO_LONG,
    DamagedRecordError,
    frame_record,
    parse_header,
)
from ftrain.formats.records.resync import DIRECT, RecordSearch, Window
from ftrain.paths import expanded

__all__ = [
    "DamagedRecordError",
    "OnDamage",
    "RecordScan",
    "check_max_record_bytes",
    "check_on_damage",
    "frame_record",
    "raise_damage",
    "read_records",
]

OnDamage = Literal["raise", "skip"]
_KNOWN = 4096  # cached headers: most files have few different lengths


def read_records(
    path: str | Path,
    *,
    compression: Compression = "auto",
    verify: bool = True,
    on_damage: OnDamage = "raise",
    damages: list[DamagedRecordError] | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[bytes]:
    """Yield every record of a file with verified checksums; raise DamagedRecordError on damage.

    `on_damage="skip"` resumes at the next whole record and appends the damage to `damages`, or
    warns at the end without such a list. A damaged region counts as one record in later numbers,
    because it is unknown how many it held. `verify=False` skips the checksums of the data; those of
    the lengths are always verified.

    A record above `max_record_bytes` (256 MiB by default) counts as damaged and is not read: a
    small compressed file can claim a huge one. Reading takes memory for about two records, and time
    linear in the bytes of the file, whatever it contains.
    """
    check_compression(compression)
    check_on_damage(on_damage)
    check_max_record_bytes(max_record_bytes)
    return _read(expanded(path), compression, verify, on_damage, damages, max_record_bytes)


def check_max_record_bytes(limit: int) -> None:
    """Raise ValueError for a limit below 1."""
    if limit < 1:
        raise ValueError(f"max_record_bytes is {limit}; it must be at least 1")


def check_on_damage(on_damage: object) -> None:
    """Raise ValueError for an unknown mode."""
    if on_damage not in ("raise", "skip"):
        raise ValueError(f'on_damage is {on_damage!r}; it must be "raise" or "skip"')


class RecordScan:
    """Iterates over (offset, data) of a stream; `report` gets each damage, and may raise."""

    def __init__(
        self,
        path: str | Path,
        stream: ByteStream,
        report: Callable[[DamagedRecordError], None],
        *,
        verify: bool = True,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ):
        self._path = path
        self._report = report
        self._verify = verify
        self._limit = max_record_bytes
        self._window = Window(stream)
        self._search = RecordSearch(self._window, max_record_bytes)
        self._uncompressed = stream.compression is not None
        self._known: dict[bytes, int] = {}
        self._damages = 0
        self._damaged_after = -1  # the number of good records before the last damage

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        data = b""
        at = 0
        delivered = 0
        start = 0
        # Locals, because this loop runs for every record.
        known = self._known
        verify = self._verify
        crc_of = google_crc32c.value
        crc_at = FOOTER.unpack_from
        while True:
            header = data[at : at + 12]
            length = known.get(header)
            if length is None:
                length = self._learn(header)
            end = at + length + 16
            if length < 0 or end > len(data):
                frame = self._next_frame(start + at, delivered)
                if frame is None:
                    return
                place, length = frame
                data = self._window.data
                start = self._window.start
                at = place - start
                end = at + length + 16
            record = b""
            # After damage many lengths may claim the same bytes: do not sum or copy them each time.
            if verify and self._damages and length > DIRECT:
                crc = self._window.crc(start + at + 12, start + end - 4)
            else:
                record = data[at + 12 : end - 4]
                crc = crc_of(record) if verify else 0
            # The mask is inlined: a call per record would take longer than its checksum.
            if (
                verify
                and crc_at(data, end - 4)[0] != ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            ):
                self._damaged(start + at, delivered, DATA_WRONG)
                place = self._beyond(start + at, end - at)
                if place is None:
                    return
                data = self._window.data
                start = self._window.start
                at = place - start
            else:
                delivered += 1
                yield start + at, record or data[at + 12 : end - 4]
                at = end

    def _learn(self, header: bytes) -> int:
        """Return the length in a header; -1 if it is damaged, incomplete or above the limit."""
        length = parse_header(header)
        if length is None or length > self._limit:
            return -1
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[header] = length
        return length

    def _next_frame(self, at: int, delivered: int) -> tuple[int, int] | None:
        """Return place and length of the first whole frame from `at` on; None at the end."""
        window = self._window
        place: int | None = at
        while place is not None:
            if not window.hold(place, HEADER.size):
                if window.end > place or window.failure:
                    self._damaged(place, delivered, window.failure or HEADER_CUT)
                return None
            length = parse_header(window.bytes_at(place, HEADER.size))
            if length is None:
                # Damage right after a damaged record belongs to the same region.
                if self._damaged_after != delivered:
                    self._damaged(place, delivered, HEADER_WRONG)
            elif length > self._limit and window.can_hold(place, length + FRAME):
                self._damaged(place, delivered, TOO_LONG.format(length=length, limit=self._limit))
            elif length <= self._limit and window.hold(place, length + FRAME):
                return place, length
            else:
                self._damaged(place, delivered, window.failure or DATA_CUT)
                if window.failure:
                    return None
            # A writer may have died within a record, and another have appended to the file.
            place = self._search.find(place + 1)
        return None

    def _beyond(self, at: int, size: int) -> int | None:
        """Return where to resume after the damaged frame at `at`; None if nothing is left."""
        window = self._window
        end = at + size
        if window.hold(at, size + HEADER.size):
            is_followed = parse_header(window.bytes_at(end, HEADER.size)) is not None
        else:
            is_followed = window.end == end  # the file ends here
        if is_followed:
            return end
        # It may have been cut short, so that its length covers a part of later records.
        return self._search.find(at + 1)

    def _damaged(self, offset: int, delivered: int, reason: str) -> None:
        number = delivered + self._damages
        self._damages += 1
        self._damaged_after = delivered
        self._report(
            DamagedRecordError(self._path, number, offset, reason, uncompressed=self._uncompressed)
        )


def _read(
    path: str | Path,
    compression: Compression,
    verify: bool,
    on_damage: OnDamage,
    damages: list[DamagedRecordError] | None,
    max_record_bytes: int,
) -> Iterator[bytes]:
    unseen: list[DamagedRecordError] = []
    report = (
        raise_damage if on_damage == "raise" else (unseen if damages is None else damages).append
    )
    with ByteStream(path, compression) as stream:
        for _, data in RecordScan(
            path, stream, report, verify=verify, max_record_bytes=max_record_bytes
        ):
            yield data
    if unseen:
        warnings.warn(
            f"{len(unseen)} damaged regions of {path} were left out; the first: {unseen[0]}",
            stacklevel=2,
        )


def raise_damage(damage: DamagedRecordError) -> None:
    """Raise the damage: a `report` for RecordScan."""
    raise damage
