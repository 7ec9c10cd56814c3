"""Compression of record files: none, GZIP or ZLIB, told apart by how a file begins."""

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

_HEAD = 64  # bytes that show the compression
_PIECE = 1 << 16  # compressed bytes that are read at once
_MOST = 1032  # bytes that one deflated byte can stand for


class StreamError(Exception):
    """A compressed stream that goes on no further, and why."""


class ByteStream:
    """The bytes of a file, uncompressed, from the start to the end."""

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
        # A file of no bytes holds no record, whatever its compression should be.
        self._ended, self._failure = not self._pending, ""

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none at the end; a StreamError where they cannot be uncompressed."""
        if self._failure:
            raise StreamError(self._failure)
        if self._ended:
            return b""
        return self._read_plain(size) if self._inflate is None else self._read_inflated(size)

    def bound(self) -> int:
        """No more bytes than these can follow; it keeps a wrong length from being believed."""
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return 1 << 62  # of a pipe nobody knows
        left = len(self._pending) + max(status.st_size - self._file.tell(), 0)
        return left if self._inflate is None else (left + _PIECE) * _MOST

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _read_plain(self, size: int) -> bytes:
        head, self._pending = self._pending, b""
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
        before = (
            self._inflate.copy()
        )  # a call that fails gives nothing, not even what came before the damage
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
        """GZIP files may be joined, and padded with zeros; nothing may follow a ZLIB stream."""
        assert self._inflate is not None
        rest = self._inflate.unused_data
        if self.compression == "GZIP":
            rest = rest.lstrip(b"\0")
            while not rest and (piece := self._file.read(_PIECE)):
                rest = piece.lstrip(b"\0")
        self._pending = rest or self._file.read(_PIECE)
        self._ended = not self._pending
        if self._pending and self.compression == "ZLIB":
            self._failure = "something else follows the end of the ZLIB stream"
        self._inflate = zlib.decompressobj(WINDOW_BITS[str(self.compression)])


class DeflatedFile:
    """Compresses what is written to `file`, which stays the caller's."""

    def __init__(self, file: BinaryIO, compression: str):
        self._file, self._deflate = file, zlib.compressobj(wbits=WINDOW_BITS[compression])

    def write(self, data: bytes) -> None:
        self._file.write(self._deflate.compress(data))

    def finish(self) -> None:
        self._file.write(self._deflate.flush())


def check_compression(compression: object) -> None:
    if compression not in ("auto", "GZIP", "ZLIB", None):
        raise ValueError(
            f'compression is {compression!r}; it must be "auto", "GZIP", "ZLIB" or None for plain files'
        )


def detect_compression(path: str | Path) -> str | None:
    """How a file is compressed; None if it is plain."""
    with ByteStream(path) as stream:
        return stream.compression


def _choose(path: str | Path, head: bytes, compression: Compression) -> str | None:
    seen = _detect(head)
    if compression == "auto":
        return seen
    # A file that looks like nothing may be a damaged one of the compression that was asked for.
    if (
        seen == compression
        or not head
        or (seen is None and parse_header(head[: HEADER.size]) is None)
    ):
        return compression
    found = seen or "a plain record file"
    wanted = compression or "a plain record file"
    way_out = repr(seen).replace("'", '"')
    raise ValueError(
        f"{path}: looks like {found} (it begins with {head[:4].hex(' ')}), expected {wanted}; "
        f'pass compression={way_out}, or "auto" to have it detected'
    )


def _detect(head: bytes) -> str | None:
    # A plain file may begin with any bytes, so its checksum is asked first.
    if parse_header(head[: HEADER.size]) is not None:
        return None
    if head.startswith(b"\x1f\x8b\x08"):
        return "GZIP"
    return "ZLIB" if _is_zlib(head) else None


def _is_zlib(head: bytes) -> bool:
    """Two bytes are a weak sign, such as the length 376 has too, so what follows must uncompress."""
    if len(head) < 2 or head[0] & 0x8F != 8 or (head[0] << 8 | head[1]) % 31:
        return False
    try:
        zlib.decompressobj().decompress(head)
    except zlib.error:
        return False
    return True


def _salvage(inflate: "zlib._Decompress", piece: bytes) -> bytes:
    """What comes before the damage: a byte at a time, as the call with the damaged byte gives nothing."""
    data = []
    with suppress(zlib.error):
        data.extend(inflate.decompress(piece[n : n + 1]) for n in range(len(piece)))
    return b"".join(data)
