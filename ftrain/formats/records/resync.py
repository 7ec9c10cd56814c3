"""Finding the next whole record in bytes that are not a record."""

from collections.abc import Iterator

import numpy as np

from ftrain.formats.checksums import masked_crc, masked_length_crcs
from ftrain.formats.records.compression import ByteStream, StreamError
from ftrain.formats.records.framing import FOOTER, FRAME, HEADER

CHUNK = 1 << 20
_CRC_OF_ZERO = masked_crc(bytes(8))


class Window:
    """The bytes of a stream from `offset` on: those that were asked for, and some of what follows."""

    def __init__(self, stream: ByteStream):
        self.data, self.offset = b"", 0
        self.failure = ""  # why the stream goes on no further, if it was damaged
        self._stream = stream

    def move(self, places: int, size: int) -> bool:
        """Drops the first `places` bytes; then tells whether there are `size` bytes in the window."""
        pieces = [self.data[places:]]
        missing = size - len(pieces[0])
        # A length that cannot be right must not make us read the entire file.
        if missing <= CHUNK or missing <= self.bound():
            while missing > 0 and (piece := self._read()):
                pieces.append(piece)
                missing -= len(piece)
        self.data, self.offset = b"".join(pieces), self.offset + places
        return len(self.data) >= size

    def move_on(self, places: int) -> bool:
        """Drops the first `places` bytes and reads some more; False if there are none."""
        piece = self._read()
        self.data, self.offset = self.data[places:] + piece, self.offset + places
        return bool(piece)

    def bound(self) -> int:
        """No more bytes than these can follow those of the window."""
        return 0 if self.failure else self._stream.bound()

    def _read(self) -> bytes:
        if self.failure:
            return b""
        try:
            return self._stream.read(CHUNK)
        except StreamError as error:
            self.failure = str(error)
            return b""


def find_record(window: Window) -> bool:
    """Moves the window to the next whole record, both checksums right, after its first byte; False if none is left.

    Data that hold whole records themselves look no different: these are found too.
    """
    start = 1
    while True:
        while (count := len(window.data) - start - HEADER.size + 1) > 0:
            count = min(count, CHUNK)
            for place, length in _candidates(window.data, start, count, len(window.data) + window.bound()):
                if _is_whole(window, place, length):
                    window.move(place, FRAME)
                    return True
            start += count
        # What is kept are the bytes at which a header may begin that ends in what is read next.
        if not window.move_on(start):
            return False
        start = 0


def _candidates(data: bytes, start: int, count: int, limit: int) -> Iterator[tuple[int, int]]:
    """Places from `start` on of headers with right checksums whose records end before `limit`, and their lengths."""
    lengths = np.ndarray(count, "<u8", data, start, (1,))  # of a header at every byte
    crcs = np.ndarray(count, "<u4", data, start + 8, (1,))
    # Few bytes of garbage make a length that fits, so checksums are computed for few places. Zeros would all be lengths
    # that fit, but there is one checksum only that follows a length of zero.
    longest = max(limit - FRAME - start, 0)
    places = np.flatnonzero((lengths <= longest) & ((lengths != 0) | (crcs == _CRC_OF_ZERO)))
    places = places[lengths[places] <= (longest - places).clip(0).astype(np.uint64)]
    places = places[masked_length_crcs(lengths[places]) == crcs[places]]
    yield from zip((start + places).tolist(), lengths[places].tolist(), strict=True)


def _is_whole(window: Window, place: int, length: int) -> bool:
    end = place + length + FRAME
    if not window.move(0, end):
        return False
    data = window.data[place + HEADER.size : end - FOOTER.size]
    return FOOTER.unpack_from(window.data, end - FOOTER.size)[0] == masked_crc(data)
