"""Masked CRC-32C checksums, as TensorFlow stores them."""

import struct
from functools import cache

import google_crc32c
import numpy as np


def masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C of the data."""
    return mask_crc(google_crc32c.value(data))


def mask_crc(crc: int) -> int:
    """Mask a CRC-32C, so that the checksum of data that contain checksums stays meaningful."""
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
    """Return what `crc` of some data contributes to the CRC-32C of the data plus `zeros` bytes.

    crc(a + b) == shift_crc(crc(a), len(b)) ^ crc(b). So the checksum of a part follows from those
    of two prefixes.
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
