"""Checksums as TensorFlow stores them."""

import struct
from functools import cache

import google_crc32c
import numpy as np


def masked_crc(data: bytes) -> int:
    """The CRC-32C of bytes, masked."""
    return mask_crc(google_crc32c.value(data))


def mask_crc(crc: int) -> int:
    """A CRC-32C rotated and shifted, so that the checksum of bytes that hold checksums stays meaningful."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def mask_crcs(crcs: np.ndarray) -> np.ndarray:
    """`mask_crc` of every uint32 in an array."""
    return ((crcs >> 15) | (crcs << 17)) + np.uint32(0xA282EAD8)


def masked_length_crcs(lengths: np.ndarray) -> np.ndarray:
    """`masked_crc` of every uint64 in an array, each as its 8 bytes."""
    zero, tables = _length_tables()
    crcs = np.full(len(lengths), zero, np.uint32)
    octets = lengths.astype("<u8").view(np.uint8).reshape(-1, 8)
    # The tables hold 0 for the byte 0, so the places above the largest length need no look-up.
    for place in range((int(lengths.max(initial=0)).bit_length() + 7) // 8):
        crcs ^= tables[place][octets[:, place]]
    return mask_crcs(crcs)


@cache
def _length_tables() -> tuple[int, np.ndarray]:
    """The checksum of 8 zero bytes, and what each byte in each place changes in it: a CRC is linear."""
    zero = google_crc32c.value(bytes(8))
    changes = [[google_crc32c.value(struct.pack("<Q", b << 8 * n)) ^ zero for b in range(256)] for n in range(8)]
    return zero, np.array(changes, np.uint32)
