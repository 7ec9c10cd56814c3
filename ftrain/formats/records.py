"""Records: TensorFlow's framing, length + checksum + bytes + checksum, as in TFRecord and event files."""

import struct
from collections.abc import Iterator
from pathlib import Path

from ftrain.formats.checksums import masked_crc

_HEADER = struct.Struct("<QI")  # length of the data, masked checksum of those 8 bytes
_FOOTER = struct.Struct("<I")  # masked checksum of the data


class DamagedRecordError(ValueError):
    """A record file whose bytes are not what was written."""


def frame_record(data: bytes) -> bytes:
    """`data` as one record."""
    length = struct.pack("<Q", len(data))
    return length + _FOOTER.pack(masked_crc(length)) + data + _FOOTER.pack(masked_crc(data))


def read_records(path: str | Path) -> Iterator[bytes]:
    """Every record of a file, checksums verified; damage is an error that says where."""
    number, offset = 0, 0
    with open(path, "rb") as file:
        while header := file.read(_HEADER.size):
            if len(header) < _HEADER.size:
                raise _damage(path, number, offset, "its header is cut short")
            length, length_crc = _HEADER.unpack(header)
            if length_crc != masked_crc(header[:8]):
                raise _damage(path, number, offset, "the checksum of its length does not match")
            body = file.read(length + _FOOTER.size)
            if len(body) < length + _FOOTER.size:
                raise _damage(path, number, offset, "its data are cut short")
            data = body[:length]
            if _FOOTER.unpack(body[length:])[0] != masked_crc(data):
                raise _damage(path, number, offset, "the checksum of its data does not match")
            yield data
            number, offset = number + 1, offset + _HEADER.size + len(body)


def _damage(path: str | Path, number: int, offset: int, what: str) -> DamagedRecordError:
    return DamagedRecordError(f"{path}: record {number} at byte {offset} is damaged: {what}")
