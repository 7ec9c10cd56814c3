"""Read the records of TFRecord and event files in order, and resume after damage.

for record in read_records("train.tfrecord.gz", on_damage="skip"):
    ...

The work is linear in the bytes of any stream: each byte is read once and checked once as the start
of a header, and the checksums of long records come from cached prefix sums.
"""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import google_crc32c
import numpy as np

from ftrain.formats.records.encoding import (
    DATA_CUT,
    DATA_WRONG,
    FOOTER,
    FRAME,
    HEADER,
    HEADER_CUT,
    HEADER_WRONG,
    MAX_RECORD_BYTES,
    TOO_LONG,
    ByteStream,
    Compression,
    DamagedRecordError,
    StreamError,
    check_compression,
    mask_crc,
    masked_crc,
    masked_length_crcs,
    parse_header,
    shift_crc,
)
from ftrain.paths import expanded

OnDamage = Literal["raise", "skip"]

CHUNK = 1 << 20  # bytes read at once
DIRECT = 1 << 14  # bytes up to which a checksum is computed directly
_SUM = 1 << 12  # bytes between two cached prefix sums
_BLOCK = 1 << 16  # places searched for headers at once
_CRC_OF_ZERO = masked_crc(bytes(8))
_MAX_CACHED = 4096  # headers; most files have few different lengths


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

    `on_damage="skip"` resumes at the next whole record and appends the damage to `damages`; without
    a list it warns at the end. A damaged region counts as one record in later numbers, because the
    number of records in it is unknown. `verify=False` skips the checksums of the data; those of the
    lengths are always verified.

    A record above `max_record_bytes` (256 MiB by default) counts as damaged and is not read: a
    small compressed file can claim a huge one. Reading takes memory for about two records, and time
    linear in the bytes of the file.
    """
    check_compression(compression)
    check_on_damage(on_damage)
    check_max_record_bytes(max_record_bytes)
    return _read(expanded(path), compression, verify, on_damage, damages, max_record_bytes)


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


def check_max_record_bytes(limit: int) -> None:
    """Raise ValueError for a limit below 1."""
    if limit < 1:
        raise ValueError(f"max_record_bytes must be at least 1, got {limit}")


def check_on_damage(on_damage: object) -> None:
    """Raise ValueError for an unknown mode."""
    if on_damage not in ("raise", "skip"):
        raise ValueError(f'on_damage must be "raise" or "skip", got {on_damage!r}')


def raise_damage(damage: DamagedRecordError) -> None:
    """Raise the damage: a `report` for RecordScan."""
    raise damage


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
        self._cached: dict[bytes, int] = {}
        self._damages = 0
        self._damaged_after = -1  # the number of good records before the last damage

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        data = b""
        at = 0
        delivered = 0
        start = 0
        # This loop runs for every record: local names are faster, and so are the numbers 12 for
        # HEADER.size, 4 for FOOTER.size and 16 for FRAME.
        cached = self._cached
        verify = self._verify
        crc_of = google_crc32c.value
        crc_at = FOOTER.unpack_from
        while True:
            header = data[at : at + 12]
            length = cached.get(header)
            if length is None:
                length = self._cache_length(header)
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
            # After damage, many lengths may claim the same bytes: do not copy those each time.
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
                self._report_damage(start + at, delivered, DATA_WRONG)
                place = self._find_next(start + at, end - at)
                if place is None:
                    return
                data = self._window.data
                start = self._window.start
                at = place - start
            else:
                delivered += 1
                yield start + at, record or data[at + 12 : end - 4]
                at = end

    def _cache_length(self, header: bytes) -> int:
        """Return the length in a header; -1 if it is damaged, incomplete or above the limit."""
        length = parse_header(header)
        if length is None or length > self._limit:
            return -1
        if len(self._cached) >= _MAX_CACHED:
            self._cached.clear()
        self._cached[header] = length
        return length

    def _next_frame(self, at: int, delivered: int) -> tuple[int, int] | None:
        """Return place and length of the first whole frame from `at` on; None at the end."""
        window = self._window
        place: int | None = at
        while place is not None:
            if not window.hold(place, HEADER.size):
                if window.end > place or window.failure:
                    self._report_damage(place, delivered, window.failure or HEADER_CUT)
                return None
            length = parse_header(window.bytes_at(place, HEADER.size))
            if length is None:
                # Damage right after a damaged record belongs to the same region.
                if self._damaged_after != delivered:
                    self._report_damage(place, delivered, HEADER_WRONG)
            elif length > self._limit and window.can_hold(place, length + FRAME):
                self._report_damage(
                    place, delivered, TOO_LONG.format(length=length, limit=self._limit)
                )
            elif length <= self._limit and window.hold(place, length + FRAME):
                return place, length
            else:
                self._report_damage(place, delivered, window.failure or DATA_CUT)
                if window.failure:
                    return None
            # A writer may have died within a record, and another one appended to the file.
            place = self._search.find(place + 1)
        return None

    def _find_next(self, at: int, size: int) -> int | None:
        """Return the place of the frame after the damaged one at `at`; None if there is none."""
        window = self._window
        end = at + size
        if window.hold(at, size + HEADER.size):
            is_followed = parse_header(window.bytes_at(end, HEADER.size)) is not None
        else:
            is_followed = window.end == end  # the file ends here
        if is_followed:
            return end
        # The record may be cut short, so that its length covers a part of later records.
        return self._search.find(at + 1)

    def _report_damage(self, offset: int, delivered: int, reason: str) -> None:
        number = delivered + self._damages
        self._damages += 1
        self._damaged_after = delivered
        self._report(
            DamagedRecordError(self._path, number, offset, reason, uncompressed=self._uncompressed)
        )


class Window:
    """The bytes `start` to `end` of a stream; it only moves forward. Places are stream offsets."""

    def __init__(self, stream: ByteStream):
        self.data = b""
        self.start = 0  # a multiple of _SUM
        self.failure = ""  # why the stream cannot be read further
        self._stream = stream
        # Checksums from one fixed place up to _sums_start, and up to each _SUM bytes after it.
        self._sums = [0]
        self._sums_start = 0

    @property
    def end(self) -> int:
        """The place after the last byte of the window."""
        return self.start + len(self.data)

    def hold(self, place: int, size: int) -> bool:
        """Read up to `place + size`, dropping earlier bytes; False if the stream is shorter."""
        missing = place + size - self.end
        if missing <= 0:
            return True
        # A wrong length must not make us read the entire file.
        if missing > CHUNK and missing > self.bound():
            return False
        # Read in proportion to the kept bytes, because those are copied each time.
        self._read(place, max(missing, (self.end - place) // 4))
        return place + size <= self.end

    def can_hold(self, place: int, size: int) -> bool:
        """Return False if the stream must end before `place + size`."""
        return place + size - self.end <= self.bound()

    def extend(self, place: int) -> bool:
        """Read more and drop bytes before `place`; return False at the end of the stream."""
        end = self.end
        self._read(place, 1)
        return self.end > end

    def bytes_at(self, place: int, size: int) -> bytes:
        """Return `size` bytes of the window from `place` on."""
        return self.data[place - self.start : place - self.start + size]

    def crc(self, start: int, end: int) -> int:
        """Return the CRC-32C of the bytes from `start` to `end`."""
        if end - start <= DIRECT:
            return google_crc32c.value(self.data[start - self.start : end - self.start])
        return self._sum(end) ^ shift_crc(self._sum(start), end - start)

    def bound(self) -> int:
        """Return an upper bound of the bytes after the window."""
        return 0 if self.failure else self._stream.bound()

    def _sum(self, place: int) -> int:
        """Return the checksum of all bytes up to `place`, from a fixed place before the window."""
        if self._sums_start + (len(self._sums) - 1) * _SUM < self.start:
            self._sums = [0]
            self._sums_start = self.start
        number = (place - self._sums_start) // _SUM
        for cached in range(len(self._sums) - 1, number):
            at = self._sums_start + cached * _SUM - self.start
            self._sums.append(google_crc32c.extend(self._sums[cached], self.data[at : at + _SUM]))
        at = self._sums_start + number * _SUM - self.start
        return google_crc32c.extend(self._sums[number], self.data[at : place - self.start])

    def _read(self, place: int, size: int) -> None:
        pieces: list[bytes] = []
        while size > 0 and (piece := self._read_piece()):
            pieces.append(piece)
            size -= len(piece)
        if pieces:
            cut = (place - self.start) // _SUM * _SUM
            self.data = b"".join([self.data[cut:], *pieces])
            self.start += cut
            passed = max((self.start - self._sums_start) // _SUM, 0)
            if passed < len(self._sums):  # the rest is still needed
                del self._sums[:passed]
                self._sums_start += passed * _SUM

    def _read_piece(self) -> bytes:
        if self.failure:
            return b""
        try:
            return self._stream.read(CHUNK)
        except StreamError as error:
            self.failure = str(error)
            return b""


class RecordSearch:
    """Finds whole records in a window; caches headers, so no place is checked twice."""

    def __init__(self, window: Window, max_record_bytes: int):
        self._window = window
        self._max_length = max_record_bytes
        self._places: list[int] = []  # of headers with right checksums
        self._lengths: list[int] = []
        self._searched = 0  # up to this place

    def find(self, place: int) -> int | None:
        """Return the place of the first whole record from `place` on, with both checksums right.

        None if there is none. Records nested in the data of a record look the same and are found.
        """
        window = self._window
        while True:
            for number in range(bisect_left(self._places, place), len(self._places)):
                if self._is_whole(self._places[number], self._lengths[number]):
                    return self._places[number]
            place = max(place, self._searched)
            if window.end - place < HEADER.size and not window.extend(place):
                return None
            self._search(place)

    def _search(self, place: int) -> None:
        """Search the next places for headers with right checksums."""
        count = min(self._window.end - place - HEADER.size + 1, _BLOCK)
        self._searched = place + max(count, 0)
        self._places = []
        self._lengths = []
        if count > 0:
            at = place - self._window.start
            places, lengths = _find_headers(self._window.data, at, count, self._max_length)
            self._places = (places + place).tolist()
            self._lengths = lengths.tolist()

    def _is_whole(self, place: int, length: int) -> bool:
        window = self._window
        if not window.hold(place, length + FRAME):
            return False
        end = place + HEADER.size + length
        (expected,) = FOOTER.unpack_from(window.data, end - window.start)
        return expected == mask_crc(window.crc(place + HEADER.size, end))


def _find_headers(
    data: bytes, start: int, count: int, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places and lengths, up to `max_length`, of headers with right checksums."""
    lengths = np.ndarray(count, "<u8", data, start, (1,))  # of a header at every byte
    crcs = np.ndarray(count, "<u4", data, start + 8, (1,))
    # Garbage is rarely a valid length, so few places need a checksum. Every place in a run of zeros
    # is a valid length, but only one checksum is right for a length of zero.
    places = np.flatnonzero((lengths <= max_length) & ((lengths != 0) | (crcs == _CRC_OF_ZERO)))
    places = places[masked_length_crcs(lengths[places]) == crcs[places]]
    return places, lengths[places]
