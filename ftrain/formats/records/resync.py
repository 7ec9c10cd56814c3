"""A window on a stream of records, and the search for the next whole record in bytes that are not one.

The work is linear in the bytes of the stream, whatever they are: each byte is read once, looked at once as the start of
a header, and a checksum of many bytes comes from sums that are kept, not from those bytes.
"""

from bisect import bisect_left

import google_crc32c
import numpy as np

from ftrain.formats.checksums import mask_crc, masked_crc, masked_length_crcs, shift_crc
from ftrain.formats.records.compression import ByteStream, StreamError
from ftrain.formats.records.framing import FOOTER, FRAME, HEADER

CHUNK = 1 << 20
DIRECT = 1 << 14  # bytes up to which a checksum is computed from the bytes themselves
_SUM = 1 << 12  # bytes between two sums that are kept
_BLOCK = 1 << 16  # places that are searched for headers together
_CRC_OF_ZERO = masked_crc(bytes(8))


class Window:
    """The bytes `start` to `end` of a stream, which moves forward only; places are offsets in the stream."""

    def __init__(self, stream: ByteStream):
        self.data = b""
        self.start = 0  # a multiple of _SUM
        self.failure = ""  # why the stream cannot be read any further, if it is damaged
        self._stream = stream
        self._sums = [
            0
        ]  # of all bytes from some place on, up to _sums_start, then to each _SUM bytes after it
        self._sums_start = 0

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def hold(self, place: int, size: int) -> bool:
        """Return whether the `size` bytes from `place` on are in the window; earlier ones may be dropped."""
        missing = place + size - self.end
        if missing <= 0:
            return True
        # A length that cannot be right must not make us read the entire file.
        if missing > CHUNK and missing > self.bound():
            return False
        # The more is kept, the more is read: what is kept is copied each time.
        self._read(place, max(missing, (self.end - place) // 4))
        return place + size <= self.end

    def can_hold(self, place: int, size: int) -> bool:
        """Return False if the stream is known to end before."""
        return place + size - self.end <= self.bound()

    def extend(self, place: int) -> bool:
        """Read some more, and drop what is before `place`; False at the end of the stream."""
        end = self.end
        self._read(place, 1)
        return self.end > end

    def bytes_at(self, place: int, size: int) -> bytes:
        """Bytes of the window."""
        return self.data[place - self.start : place - self.start + size]

    def crc(self, start: int, end: int) -> int:
        """The CRC-32C of bytes of the window."""
        if end - start <= DIRECT:
            return google_crc32c.value(self.data[start - self.start : end - self.start])
        return self._sum(end) ^ shift_crc(self._sum(start), end - start)

    def bound(self) -> int:
        """An upper limit for the number of bytes that follow the window."""
        return 0 if self.failure else self._stream.bound()

    def _sum(self, place: int) -> int:
        """The checksum of all bytes up to `place`, from one and the same place before the window on."""
        if self._sums_start + (len(self._sums) - 1) * _SUM < self.start:
            self._sums, self._sums_start = [0], self.start
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
    """Finds whole records in a window. It remembers the headers it has seen, so no place is looked at twice."""

    def __init__(self, window: Window, max_record_bytes: int):
        self._window = window
        self._longest = max_record_bytes
        self._places: list[int] = []  # of headers with right checksums
        self._lengths: list[int] = []
        self._searched = 0  # up to this place

    def find(self, place: int) -> int | None:
        """Return where the first whole record from `place` on starts, both checksums right; None if there is none.

        Data that hold whole records themselves look no different: these are found too.
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
        """Look at the next places for headers with right checksums."""
        count = min(self._window.end - place - HEADER.size + 1, _BLOCK)
        self._searched = place + max(count, 0)
        self._places, self._lengths = [], []
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
        (wanted,) = FOOTER.unpack_from(window.data, end - window.start)
        return wanted == mask_crc(window.crc(place + HEADER.size, end))


def _find_headers(
    data: bytes, start: int, count: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return where from `start` on headers with right checksums are, and the lengths in them, at most `longest`."""
    lengths = np.ndarray(count, "<u8", data, start, (1,))  # of a header at every byte
    crcs = np.ndarray(count, "<u4", data, start + 8, (1,))
    # Few bytes of garbage make a length that fits, so checksums are computed for few places. Zeros would all be lengths
    # that fit, but there is one checksum only that follows a length of zero.
    places = np.flatnonzero((lengths <= longest) & ((lengths != 0) | (crcs == _CRC_OF_ZERO)))
    places = places[masked_length_crcs(lengths[places]) == crcs[places]]
    return places, lengths[places]
