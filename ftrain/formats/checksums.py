"""Checksums as TensorFlow stores them."""

import google_crc32c


def masked_crc(data: bytes) -> int:
    """The CRC-32C of bytes, masked."""
    return mask_crc(google_crc32c.value(data))


def mask_crc(crc: int) -> int:
    """A CRC-32C rotated and shifted, so that the checksum of bytes that hold checksums stays meaningful."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
