"""The frame of a record: length, checksum of the length, data, checksum of the data."""

import struct
from pathlib import Path

from ftrain.formats.checksums import masked_crc

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

    # Lets the exception pass from one process to another with its attributes.
    def __reduce__(self) -> tuple:
        return (
            _rebuild_error,
            (self.path, self.number, self.offset, self.reason, self.uncompressed),
            vars(self),
        )


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


def _rebuild_error(
    path: Path, number: int, offset: int, reason: str, uncompressed: bool
) -> DamagedRecordError:
    return DamagedRecordError(path, number, offset, reason, uncompressed=uncompressed)
