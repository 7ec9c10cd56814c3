"""Compression of record files: none, GZIP or ZLIB, detected from the first bytes."""

import os
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

from ftrain.formats.records.framing import HEADER, parse_header

Compression = Literal["auto", "GZIP", "ZLIB"] | None
WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}
SUFFIXES: dict[str, Literal["GZIP", "ZLIB"]] = {
    ".gz": "GZIP",
    ".gzip": "GZIP",
    ".z": "ZLIB",
    ".zz": "ZLIB",
    ".zlib": "ZLIB",
}

_HEAD = 64  # bytes from which the compression is detected
_PIECE = 1 << 16  # compressed bytes read at once
_MAX_RATIO = 1032  # the most that deflate can compress


class StreamError(Exception):
    """A compressed stream that is damaged or cut short."""


class ByteStream:
    """Reads the uncompressed bytes of a file from start to end."""

    def __init__(self, path: str | Path, compression: Compression = "auto"):
        check_compression(compression)
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close()
        try:
            self._pending = self._file.read(_HEAD)
            self.compression = _choose(path, self._pending, compression)
        except BaseException:
            self._file.close()
            raise
        self._inflate = (
            zlib.decompressobj(WINDOW_BITS[self.compression]) if self.compression else None
        )
        # An empty file holds no records, whatever its compression.
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
        return left if self._inflate is None else (left + _PIECE) * _MAX_RATIO

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _read_plain(self, size: int) -> bytes:
        head = self._pending
        self._pending = b""
        return head + self._file.read(max(size - len(head), 0))

    def _read_inflated(self, size: int) -> bytes:
        assert self._inflate is not None
        while not self._ended:
            piece = self._pending or self._file.read(_PIECE)
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
        rest = self._inflate.unused_data
        if self.compression == "GZIP":
            rest = rest.lstrip(b"\0")
            while not rest and (piece := self._file.read(_PIECE)):
                rest = piece.lstrip(b"\0")
        self._pending = rest or self._file.read(_PIECE)
        self._ended = not self._pending
        if self._pending and self.compression == "ZLIB":
            self._failure = "extra bytes follow the end of the ZLIB stream"
        self._inflate = zlib.decompressobj(WINDOW_BITS[str(self.compression)])


class DeflatedFile:
    """Compresses data written to `file`; the caller closes the file."""

    def __init__(self, file: BinaryIO, compression: str):
        self._file = file
        self._deflate = zlib.compressobj(wbits=WINDOW_BITS[compression])

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
            f"compression is {compression!r}; "
            'it must be "auto", "GZIP", "ZLIB" or None for plain files'
        )


def detect_compression(path: str | Path) -> str | None:
    """Return the compression of a file; None if it is plain."""
    with ByteStream(path) as stream:
        return stream.compression


def _choose(path: str | Path, head: bytes, compression: Compression) -> str | None:
    seen = _detect(head)
    if compression == "auto":
        return seen
    # A file of unknown kind may be a damaged one of the given compression.
    if (
        seen == compression
        or not head
        or (seen is None and parse_header(head[: HEADER.size]) is None)
    ):
        return compression
    found = seen or "a plain record file"
    expected = compression or "a plain record file"
    way_out = repr(seen).replace("'", '"')
    raise ValueError(
        f"{path}: looks like {found} (it begins with {head[:4].hex(' ')}), expected {expected}; "
        f'pass compression={way_out}, or "auto" to have it detected'
    )


def _detect(head: bytes) -> str | None:
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
    """Return the data before the damage, byte by byte: the call that fails returns nothing."""
    data = []
    with suppress(zlib.error):
        data.extend(inflate.decompress(piece[n : n + 1]) for n in range(len(piece)))
    return b"".join(data)
