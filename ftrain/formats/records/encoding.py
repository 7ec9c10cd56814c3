"""The encoding of record files: frames with checksums, and the compression around them.

A frame is the length of the data as uint64, its masked CRC-32C, the data, and their masked CRC-32C.
A whole file may be compressed with GZIP or ZLIB, which is detected from its first bytes.
"""

import os
import re
import stat
import struct
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal, Self

import google_crc32c
import numpy as np

HEADER = struct.Struct("<QI")  # length of the data, masked checksum of those 8 bytes
FOOTER = struct.Struct("<I")  # masked checksum of the data
FRAME = HEADER.size + FOOTER.size  # bytes of a record besides its data

# Sidecars store these texts, so changing them changes files on disk.
HEADER_CUT = "its header is cut short"
HEADER_WRONG = "the checksum of its length does not match"
DATA_CUT = "its data are cut short"
DATA_WRONG = "the checksum of its data does not match"
TOO_LONG = (
    "it has {length} bytes, more than max_record_bytes={limit}; "
    "pass a larger limit if it is meant to be so long"
)

MAX_RECORD_BYTES = 1 << 28  # default limit: 256 MiB

Codec = Literal["GZIP", "ZLIB"]
Compression = Literal["auto"] | Codec | None  # None for plain files
_WINDOW_BITS: dict[Codec, int] = {"GZIP": 31, "ZLIB": 15}
_SUFFIXES: dict[str, Codec] = {
    ".gz": "GZIP",
    ".gzip": "GZIP",
    ".z": "ZLIB",
    ".zz": "ZLIB",
    ".zlib": "ZLIB",
}
RECORD_NAME = re.compile(
    r"\.(tfrecords?|records?)(-\d+-of-\d+)?(\.(gz|gzip|z|zz|zlib))?\Z", re.IGNORECASE
)

_HEAD_BYTES = 64  # the compression is detected from these
_CHUNK = 1 << 16  # compressed bytes read at once
_MAX_RATIO = 1032  # the largest compression ratio of deflate


class DamagedRecordError(ValueError):
    """A damaged record: its file, number and offset, and what is wrong.

    With `uncompressed` the offset counts bytes of the uncompressed data.
    """

    def __init__(
        self, path: str | Path, number: int, offset: int, reason: str, *, uncompressed: bool = False
    ):
        note = " (the offset is that in the uncompressed data)" if uncompressed else ""
        super().__init__(f"{path}: record {number} at byte {offset} is damaged: {reason}{note}")
        self.path = Path(path)
        self.number = number
        self.offset = offset
        self.reason = reason
        self.uncompressed = uncompressed

    # Keeps the attributes when the exception is sent to another process.
    def __reduce__(self) -> tuple:
        return (
            _rebuild_error,
            (self.path, self.number, self.offset, self.reason, self.uncompressed),
            vars(self),
        )


def _rebuild_error(
    path: Path, number: int, offset: int, reason: str, uncompressed: bool
) -> DamagedRecordError:
    return DamagedRecordError(path, number, offset, reason, uncompressed=uncompressed)


def frame_record(data: bytes) -> bytes:
    """Return `data` framed as one record."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, FOOTER.pack(masked_crc(length)), data, FOOTER.pack(masked_crc(data))))


def parse_header(header: bytes) -> int | None:
    """Return the length in a record's first 12 bytes; None if incomplete or damaged."""
    if len(header) < HEADER.size:
        return None
    length, crc = HEADER.unpack(header)
    return length if crc == masked_crc(header[:8]) else None


def masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C of the data."""
    return mask_crc(google_crc32c.value(data))


def mask_crc(crc: int) -> int:
    """Mask a CRC-32C: the plain CRC of data that contain their own CRC is weak."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def mask_crcs(crcs: np.ndarray) -> np.ndarray:
    """Return `mask_crc` of every uint32 in an array."""
    return ((crcs >> 15) | (crcs << 17)) + np.uint32(0xA282EAD8)


def masked_length_crcs(lengths: np.ndarray) -> np.ndarray:
    """Return `masked_crc` of the 8 bytes of every uint64 in an array."""
    zero, tables = _length_tables()
    crcs = np.full(len(lengths), zero, np.uint32)
    octets = lengths.astype("<u8").view(np.uint8).reshape(-1, 8)
    # The tables have 0 for byte 0, so bytes above the largest length need no lookup.
    for place in range((int(lengths.max(initial=0)).bit_length() + 7) // 8):
        crcs ^= tables[place][octets[:, place]]
    return mask_crcs(crcs)


def shift_crc(crc: int, zeros: int) -> int:
    """Return the part of `crc` in the CRC-32C of the same data followed by `zeros` bytes.

    crc(a + b) == shift_crc(crc(a), len(b)) ^ crc(b). So the checksums of two prefixes give that of
    the bytes between them.
    """
    power = 0
    while zeros:
        if zeros & 1:
            first, second, third, fourth = _shift_tables(power)
            crc = (
                first[crc & 255]
                ^ second[crc >> 8 & 255]
                ^ third[crc >> 16 & 255]
                ^ fourth[crc >> 24]
            )
        zeros >>= 1
        power += 1
    return crc


@cache
def _shift_tables(power: int) -> list[list[int]]:
    """Return tables of the shift by 2**power bytes, for each of the four bytes of a checksum."""
    if power == 0:
        bits = [_shift_bits(1 << bit) for bit in range(32)]
    else:
        bits = [shift_crc(shift_crc(1 << bit, 1 << power - 1), 1 << power - 1) for bit in range(32)]
    tables = []
    for place in range(0, 32, 8):
        table = [0]
        for bit in bits[place : place + 8]:  # the shift is linear over bits
            table += [bit ^ other for other in table]
        tables.append(table)
    return tables


def _shift_bits(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)  # the reversed polynomial
    return crc


@cache
def _length_tables() -> tuple[int, np.ndarray]:
    """Return the checksum of 8 zero bytes, and how each byte at each place changes it."""
    zero = google_crc32c.value(bytes(8))
    changes = [
        [google_crc32c.value(struct.pack("<Q", b << 8 * n)) ^ zero for b in range(256)]
        for n in range(8)
    ]
    return zero, np.array(changes, np.uint32)


class StreamError(Exception):
    """A compressed stream that is damaged or cut short."""


class ByteStream:
    """Reads the uncompressed bytes of a file from start to end."""

    def __init__(self, path: str | Path, compression: Compression = "auto"):
        check_compression(compression)
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close()
        try:
            self._pending = self._file.read(_HEAD_BYTES)
            self.compression: Codec | None = _choose_compression(path, self._pending, compression)
        except BaseException:
            self._file.close()
            raise
        self._inflate = (
            zlib.decompressobj(_WINDOW_BITS[self.compression]) if self.compression else None
        )
        # An empty file has no records, with any compression.
        self._ended = not self._pending
        self._failure = ""

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end; StreamError if they are damaged."""
        if self._failure:
            raise StreamError(self._failure)
        if self._ended:
            return b""
        return self._read_plain(size) if self._inflate is None else self._read_inflated(size)

    def bound(self) -> int:
        """Return an upper bound of the remaining bytes, to reject wrong lengths."""
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return 1 << 62  # unknown for a pipe
        left = len(self._pending) + max(status.st_size - self._file.tell(), 0)
        return left if self._inflate is None else (left + _CHUNK) * _MAX_RATIO

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_plain(self, size: int) -> bytes:
        head = self._pending
        self._pending = b""
        return head + self._file.read(max(size - len(head), 0))

    def _read_inflated(self, size: int) -> bytes:
        assert self._inflate is not None
        while not self._ended:
            piece = self._pending or self._file.read(_CHUNK)
            data = self._decompress(piece, size)
            if self._inflate.eof:
                self._next_member()
            if data:
                return data
            if self._failure:
                raise StreamError(self._failure)
            if not piece and not self._ended:
                raise StreamError(f"the {self.compression} stream is cut short")
        return b""

    def _decompress(self, piece: bytes, size: int) -> bytes:
        assert self._inflate is not None
        # A failing call returns nothing, not even the data before the damage.
        before = self._inflate.copy()
        try:
            data = self._inflate.decompress(piece, size)
        except zlib.error as error:
            self._failure = f"the {self.compression} stream is damaged ({error})"
            if data := _salvage(before, piece):
                return data
            raise StreamError(self._failure) from None
        self._pending = self._inflate.unconsumed_tail
        return data

    def _next_member(self) -> None:
        """Continue after the end of a stream.

        GZIP files may be concatenated and padded with zeros; nothing may follow a ZLIB stream.
        """
        assert self._inflate is not None
        assert self.compression is not None
        rest = self._inflate.unused_data
        if self.compression == "GZIP":
            rest = rest.lstrip(b"\0")
            while not rest and (piece := self._file.read(_CHUNK)):
                rest = piece.lstrip(b"\0")
        self._pending = rest or self._file.read(_CHUNK)
        self._ended = not self._pending
        if self._pending and self.compression == "ZLIB":
            self._failure = "extra bytes follow the end of the ZLIB stream"
        self._inflate = zlib.decompressobj(_WINDOW_BITS[self.compression])


class DeflatedFile:
    """Compresses data written to `file`; the caller closes the file."""

    def __init__(self, file: BinaryIO, codec: Codec):
        self._file = file
        self._deflate = zlib.compressobj(wbits=_WINDOW_BITS[codec])

    def write(self, data: bytes) -> None:
        """Compress and write the data."""
        self._file.write(self._deflate.compress(data))

    def finish(self) -> None:
        """Write the end of the stream."""
        self._file.write(self._deflate.flush())


def check_compression(compression: object) -> None:
    """Raise ValueError for an unknown compression."""
    if compression not in ("auto", "GZIP", "ZLIB", None):
        raise ValueError(
            'compression must be "auto", "GZIP", "ZLIB" or None for plain files, '
            f"got {compression!r}"
        )


def suffix_compression(path: Path) -> Codec | None:
    """Return the compression that the suffix of a record file stands for."""
    return _SUFFIXES.get(path.suffix.lower())


def plain_name(path: Path) -> Path:
    """Return a name for the plain copy of a compressed record file."""
    plain = path.with_suffix("") if suffix_compression(path) else path.with_suffix(".plain")
    return plain if RECORD_NAME.search(plain.name) else plain.with_name(f"{plain.name}.tfrecord")


def detect_compression(path: str | Path) -> Codec | None:
    """Return the compression of a file; None if it is plain."""
    with ByteStream(path) as stream:
        return stream.compression


def _choose_compression(path: str | Path, head: bytes, compression: Compression) -> Codec | None:
    detected = _detect_compression(head)
    if compression == "auto":
        return detected
    # A file of unknown kind may be a damaged one of the given compression.
    is_unknown = detected is None and parse_header(head[: HEADER.size]) is None
    if compression == detected or is_unknown or not head:
        return compression
    found = detected or "a plain record file"
    expected = compression or "a plain record file"
    argument = "None" if detected is None else f'"{detected}"'
    raise ValueError(
        f"{path}: looks like {found} (it begins with {head[:4].hex(' ')}), expected {expected}; "
        f'pass compression={argument}, or "auto" to detect it'
    )


def _detect_compression(head: bytes) -> Codec | None:
    # A plain file may start with any bytes, so its checksum is checked first.
    if parse_header(head[: HEADER.size]) is not None:
        return None
    if head.startswith(b"\x1f\x8b\x08"):
        return "GZIP"
    return "ZLIB" if _is_zlib(head) else None


def _is_zlib(head: bytes) -> bool:
    """Return True for a ZLIB head: two bytes are a weak sign, so the rest must uncompress."""
    if len(head) < 2 or head[0] & 0x8F != 8 or (head[0] << 8 | head[1]) % 31:
        return False
    try:
        zlib.decompressobj().decompress(head)
    except zlib.error:
        return False
    return True


def _salvage(inflate: "zlib._Decompress", piece: bytes) -> bytes:
    """Return the data before the damage, one byte at a time: a call that fails returns nothing."""
    data = []
    with suppress(zlib.error):
        data.extend(inflate.decompress(piece[n : n + 1]) for n in range(len(piece)))
    return b"".join(data)
