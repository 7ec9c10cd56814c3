"""Walking a plain record file from frame to frame, to learn where its records lie."""

import mmap
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ftrain.formats.records.compression import ByteStream
from ftrain.formats.records.framing import (
    DATA_CUT,
    FRAME,
    HEADER,
    HEADER_CUT,
    HEADER_WRONG,
    DamagedRecordError,
    parse_header,
)
from ftrain.formats.records.reading import OnDamage, RecordScan

_REPEATS = 16  # equal headers in a row after which more of them are expected
_LARGEST_GUESS = 1 << 20  # records looked at in one comparison


class Frames(NamedTuple):
    """Where the records of a file lie, and what is damaged in it."""

    offsets: np.ndarray  # int64, of each frame
    lengths: np.ndarray  # int64, of the data of each
    damages: tuple[DamagedRecordError, ...]


def walk_frames(path: Path, on_damage: OnDamage, max_record_bytes: int) -> Frames:
    """The frames of a plain file. "raise" reads headers only; "skip" reads all data too, to leave out damaged ones."""
    return _follow_headers(path) if on_damage == "raise" else _verify_all(path, max_record_bytes)


def _verify_all(path: Path, max_record_bytes: int) -> Frames:
    damages: list[DamagedRecordError] = []
    offsets, lengths = array("q"), array("q")
    with ByteStream(path, None) as stream:
        for offset, data in RecordScan(
            path, stream, damages.append, max_record_bytes=max_record_bytes
        ):
            offsets.append(offset)
            lengths.append(len(data))
    return Frames(_integers(offsets), _integers(lengths), tuple(damages))


def _follow_headers(path: Path) -> Frames:
    with open(path, "rb") as file:
        if not file.seek(0, 2):  # no bytes cannot be mapped
            return Frames(_integers(array("q")), _integers(array("q")), ())
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    offsets, lengths = array("q"), array("q")
    known: dict[bytes, int] = {}
    at, size, previous, repeats = 0, len(view), b"", 0
    while at < size:
        header = view[at : at + 12]
        length = known.get(header)
        if length is None:
            length = known[header] = _length(path, header, len(offsets), at)
        end = at + length + FRAME
        if end > size:
            raise DamagedRecordError(path, len(offsets), at, DATA_CUT)
        offsets.append(at)
        lengths.append(length)
        at = end
        repeats = repeats + 1 if header == previous else 0
        previous = header
        if repeats == _REPEATS:
            count, stride = _count_equal(view, at, header, length + FRAME), length + FRAME
            offsets.frombytes((at + stride * np.arange(count, dtype=np.int64)).tobytes())
            lengths.frombytes(np.full(count, length, np.int64).tobytes())
            at, repeats = at + count * stride, 0
    return Frames(_integers(offsets), _integers(lengths), ())


def _length(path: Path, header: bytes, number: int, at: int) -> int:
    length = parse_header(header)
    if length is None:
        raise DamagedRecordError(
            path, number, at, HEADER_WRONG if len(header) == HEADER.size else HEADER_CUT
        )
    return length


def _count_equal(view: mmap.mmap, at: int, header: bytes, stride: int) -> int:
    """How many whole frames with the same header follow each other from `at` on; guesses that double in length."""
    length, crc = HEADER.unpack(header)
    count, guess, most = 0, 64, (len(view) - at) // stride
    while count < most:
        guess = min(guess, most - count)
        start = at + count * stride
        same = np.ndarray(guess, "<u8", view, start, (stride,)) == length
        same &= np.ndarray(guess, "<u4", view, start + 8, (stride,)) == crc
        if not same.all():
            return count + int(same.argmin())
        count, guess = count + guess, min(2 * guess, _LARGEST_GUESS)
    return count


def _integers(values: array) -> np.ndarray:
    return np.frombuffer(values, np.int64)
