"""The index of a record file: where each record lies, for random access."""

import mmap
import os
import shlex
import stat
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ftrain.formats.records.compression import ByteStream, detect_compression
from ftrain.formats.records.framing import (
    DATA_CUT,
    FRAME,
    HEADER,
    HEADER_CUT,
    HEADER_WRONG,
    MAX_RECORD_BYTES,
    TOO_LONG,
    DamagedRecordError,
    parse_header,
)
from ftrain.formats.records.reading import (
    OnDamage,
    RecordScan,
    check_max_record_bytes,
    check_on_damage,
)
from ftrain.formats.records.sidecar import Frames, load_sidecar, save_sidecar

_REPEATS = 16  # equal headers in a row, after which more of them are compared at once
_LARGEST_GUESS = 1 << 20  # records in one comparison


@dataclass(frozen=True, eq=False)
class RecordIndex:
    """The records of the plain file `path` when it had this size and modification time."""

    path: Path
    offsets: np.ndarray  # int64, of each frame
    lengths: np.ndarray  # int64, of the data of each
    size: int
    mtime_ns: int
    damages: tuple[DamagedRecordError, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets)


def index_records(
    path: str | Path,
    *,
    on_damage: OnDamage = "raise",
    sidecar: bool = True,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> RecordIndex:
    """Return the index of a plain record file, from an up-to-date sidecar PATH.index or the file.

    "raise" follows the headers without reading the data: a damaged header is an error. "skip" reads
    everything once and leaves out damaged records. With `sidecar` the index is kept beside the
    file, if possible. A record above `max_record_bytes` (256 MiB by default) counts as damaged.
    """
    check_on_damage(on_damage)
    check_max_record_bytes(max_record_bytes)
    path = Path(path)
    _refuse_compressed(path)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: is not a regular file, so it has no random access")
    frames = load_sidecar(path, status, on_damage, max_record_bytes) if sidecar else None
    if frames is None:
        frames = walk_frames(path, on_damage, max_record_bytes)
        if sidecar and _unchanged(path, status):
            save_sidecar(path, status, on_damage, frames, max_record_bytes)
    _refuse_long(path, frames, max_record_bytes)
    return RecordIndex(
        path, frames.offsets, frames.lengths, status.st_size, status.st_mtime_ns, frames.damages
    )


def _refuse_long(path: Path, frames: Frames, limit: int) -> None:
    long = frames.lengths > limit
    if long.any():
        number = int(long.argmax())
        reason = TOO_LONG.format(length=frames.lengths[number], limit=limit)
        raise DamagedRecordError(path, number, int(frames.offsets[number]), reason)


def _refuse_compressed(path: Path) -> None:
    if compression := detect_compression(path):
        command = shlex.join(["ftrain", "data", "convert", str(path), str(_plain_name(path))])
        raise ValueError(
            f"{path}: is compressed ({compression}), and random access needs a plain file; "
            f"make one with `{command}` and remove this one, "
            "or pass cache=DIRECTORY to unpack it there"
        )


def _plain_name(path: Path) -> Path:
    """Return a name for the plain file that differs from the compressed one."""
    name = path.with_suffix(".tfrecord" if path.with_suffix("").suffix != ".tfrecord" else "")
    return name if name != path else path.with_suffix(".plain.tfrecord")


def _unchanged(path: Path, status: os.stat_result) -> bool:
    """Return False if the file changed while it was read: its sidecar would be incomplete."""
    now = os.stat(path)
    return (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def walk_frames(path: Path, on_damage: OnDamage, max_record_bytes: int) -> Frames:
    """Return the frames of a plain file; "raise" reads headers only, "skip" verifies all data."""
    return _follow_headers(path) if on_damage == "raise" else _verify_all(path, max_record_bytes)


def _verify_all(path: Path, max_record_bytes: int) -> Frames:
    damages: list[DamagedRecordError] = []
    offsets = array("q")
    lengths = array("q")
    with ByteStream(path, None) as stream:
        for offset, data in RecordScan(
            path, stream, damages.append, max_record_bytes=max_record_bytes
        ):
            offsets.append(offset)
            lengths.append(len(data))
    return Frames(_integers(offsets), _integers(lengths), tuple(damages))


def _follow_headers(path: Path) -> Frames:
    with open(path, "rb") as file:
        if not file.seek(0, 2):  # an empty file cannot be mapped
            return Frames(_integers(array("q")), _integers(array("q")), ())
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    offsets = array("q")
    lengths = array("q")
    known: dict[bytes, int] = {}
    at = 0
    size = len(view)
    previous = b""
    repeats = 0
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
            stride = length + FRAME
            count = _count_equal(view, at, header, stride)
            offsets.frombytes((at + stride * np.arange(count, dtype=np.int64)).tobytes())
            lengths.frombytes(np.full(count, length, np.int64).tobytes())
            at += count * stride
            repeats = 0
    return Frames(_integers(offsets), _integers(lengths), ())


def _length(path: Path, header: bytes, number: int, at: int) -> int:
    length = parse_header(header)
    if length is None:
        raise DamagedRecordError(
            path, number, at, HEADER_WRONG if len(header) == HEADER.size else HEADER_CUT
        )
    return length


def _count_equal(view: mmap.mmap, at: int, header: bytes, stride: int) -> int:
    """Count the whole frames in a row from `at` on with the same header, in doubling guesses."""
    length, crc = HEADER.unpack(header)
    count = 0
    guess = 64
    most = (len(view) - at) // stride
    while count < most:
        guess = min(guess, most - count)
        start = at + count * stride
        same = np.ndarray(guess, "<u8", view, start, (stride,)) == length
        same &= np.ndarray(guess, "<u4", view, start + 8, (stride,)) == crc
        if not same.all():
            return count + int(same.argmin())
        count += guess
        guess = min(2 * guess, _LARGEST_GUESS)
    return count


def _integers(values: array) -> np.ndarray:
    return np.frombuffer(values, np.int64)
