"""Resynchronization: search for the next whole record after damage, in a window on the stream.

The work is linear in the bytes of the stream, whatever they are: each byte is read once, checked
once as the start of a header, and checksums of many bytes come from cached prefix sums.
"""

from bisect import bisect_left

import google_crc32c
import numpy as np

from ftrain.formats.checksums import mask_crc, masked_crc, masked_length_crcs, shift_crc
from ftrain.formats.records.compression import ByteStream, StreamError
from ftrain.formats.records.framing import FOOTER, FRAME, HEADER

CHUNK = 1 << 20
DIRECT = 1 << 14  # bytes up to which a checksum is computed directly
_SUM = 1 << 12  # bytes between two cached prefix sums
_BLOCK = 1 << 16  # places searched for headers at once
_CRC_OF_ZERO = masked_crc(bytes(8))


class Window:
    """The bytes `start` to `end` of a stream; it only moves forward. Places are stream offsets."""

    def __init__(self, stream: ByteStream):
        self.data = b""
        self.start = 0  # a multiple of _SUM
        self.failure = ""  # why a damaged stream cannot be read any further
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
        # Read in proportion to what is kept, because that is copied each time.
        self._read(place, max(missing, (self.end - place) // 4))
        return place + size <= self.end

    def can_hold(self, place: int, size: int) -> bool:
        """Return False if the stream is known to end before `place + size`."""
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
        for known in range(len(self._sums) - 1, number):
            at = self._sums_start + known * _SUM - self.start
            self._sums.append(google_crc32c.extend(self._sums[known], self.data[at : at + _SUM]))
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
        self._longest = max_record_bytes
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
            places, lengths = _find_headers(self._window.data, at, count, self._longest)
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
    data: bytes, start: int, count: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of headers with right checksums, and their lengths, at most `longest`."""
    lengths = np.ndarray(count, "<u8", data, start, (1,))  # of a header at every byte
    crcs = np.ndarray(count, "<u4", data, start + 8, (1,))
    # Garbage rarely gives a length that fits, so checksums are computed for few places. Runs of
    # zeros would fit everywhere, but only one checksum is right for a length of zero.
    places = np.flatnonzero((lengths <= longest) & ((lengths != 0) | (crcs == _CRC_OF_ZERO)))
    places = places[masked_length_crcs(lengths[places]) == crcs[places]]
    return places, lengths[places]
