"""Sorted tables: LevelDB's format of the index of a TensorFlow checkpoint."""

import struct
from collections.abc import Iterator

from ftrain.formats.checksums import masked_crc

_FOOTER_SIZE = 48  # two block handles, padding, magic number
_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
_TRAILER = struct.Struct("<BI")  # compression, masked checksum of the block and the compression
_PLAIN = 0
_SNAPPY = 1
# Keys share prefixes, so a small block can expand to a huge one. TensorFlow writes every 16th key
# in full, which keeps valid blocks below 16 times their size.
_MAX_EXPANSION = 64


class DamagedTableError(ValueError):
    """A table that is damaged or compressed."""


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a whole file in the order of the keys, checksums verified."""
    last_key = None
    last_end = 0
    for _, value in _entries(_block(data, *_index_handle(data))):
        offset, size = _handle(value)
        # Increasing offsets and keys keep the work linear in the size of the file.
        if offset < last_end:
            raise DamagedTableError(
                f"the block at byte {offset} starts before byte {last_end}, the end of another"
            )
        last_end = offset + size + _TRAILER.size
        for entry in _entries(_block(data, offset, size)):
            if last_key is not None and entry[0] <= last_key:
                raise DamagedTableError(
                    f"key {entry[0]!r} follows {last_key!r}, "
                    "expected sorted keys without repetition"
                )
            last_key = entry[0]
            yield entry


def read_varint(data: bytes, at: int, bits: int = 64) -> tuple[int, int]:
    """Return the number of up to `bits` bits at byte `at`, and the place after it."""
    value = 0
    for shift in range(0, bits, 7):
        if at >= len(data):
            raise DamagedTableError(f"a number is cut short at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value >> bits == 0:
            return value, at
    raise DamagedTableError(f"a number before byte {at} has more than {bits} bits")


def _index_handle(data: bytes) -> tuple[int, int]:
    if len(data) < _FOOTER_SIZE:
        raise DamagedTableError(f"it has {len(data)} bytes, a table has at least {_FOOTER_SIZE}")
    footer = data[-_FOOTER_SIZE:]
    if not footer.endswith(_MAGIC):
        raise DamagedTableError(
            f"it ends in {footer[-len(_MAGIC) :].hex()}, a table in {_MAGIC.hex()}"
        )
    # The first handle is that of the metaindex, which TensorFlow leaves empty.
    _, at = read_varint(footer, 0)
    _, at = read_varint(footer, at)
    return _handle(footer[at : -len(_MAGIC)])


def _handle(value: bytes) -> tuple[int, int]:
    offset, at = read_varint(value, 0)
    size, _ = read_varint(value, at)
    return offset, size


def _block(data: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    limit = len(data) - _FOOTER_SIZE
    if end + _TRAILER.size > limit:
        raise DamagedTableError(
            f"a block at byte {offset} of {size} bytes does not end before the footer at {limit}"
        )
    compression, checksum = _TRAILER.unpack_from(data, end)
    if checksum != masked_crc(data[offset : end + 1]):
        raise DamagedTableError(
            f"the block at byte {offset} of {size} bytes is damaged: its checksum does not match"
        )
    if compression == _SNAPPY:
        raise DamagedTableError(
            f"the block at byte {offset} is compressed with snappy, which is unsupported; load and "
            "save it with TensorFlow, which writes the index of a checkpoint uncompressed"
        )
    if compression != _PLAIN:
        raise DamagedTableError(
            f"the block at byte {offset} has compression {compression}, expected 0 (none)"
        )
    return data[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    # The restart points at the end serve binary search; only their start matters here.
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise DamagedTableError(
            f"a block of {len(block)} bytes has no room for its {restarts} restart points"
        )
    at = 0
    key = b""
    expanded = 0
    while at < end:
        shared, at = read_varint(block, at, 32)
        rest, at = read_varint(block, at, 32)
        length, at = read_varint(block, at, 32)
        if shared > len(key) or rest + length > end - at:
            raise DamagedTableError(
                f"an entry shares {shared} bytes and has {rest} + {length}, "
                "beyond the end of its block"
            )
        key = key[:shared] + block[at : at + rest]
        expanded += len(key)
        if expanded > _MAX_EXPANSION * len(block):
            raise DamagedTableError(
                f"a block of {len(block)} bytes has keys of more than {expanded} bytes"
            )
        at += rest + length
        yield key, block[at - length : at]
