"""The index of a record file, for random access: the offset and length of each record.

The index is kept in a sidecar, the file PATH.index beside the record file. A sidecar has a magic
string, the length of the JSON header as uint32, the JSON header, offsets and lengths as int64, and
the CRC-32C of all of that as uint32, each little-endian. A sidecar with any error is ignored.
"""

import json
import mmap
import os
import shlex
import stat
import struct
import uuid
from array import array
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from ftrain.formats.records.encoding import (
    DATA_CUT,
    FRAME,
    HEADER,
    HEADER_CUT,
    HEADER_WRONG,
    MAX_RECORD_BYTES,
    TOO_LONG,
    ByteStream,
    DamagedRecordError,
    detect_compression,
    parse_header,
    plain_name,
)
from ftrain.formats.records.reading import (
    OnDamage,
    RecordScan,
    check_max_record_bytes,
    check_on_damage,
)
from ftrain.storage import replacing

SIDECAR_SUFFIX = ".index"
_MAGIC = b"ftrain records 1"
_UINT32 = struct.Struct("<I")
_EDGE = 4096  # bytes at both ends of a record file whose checksums identify it
_REPEATS = 16  # equal headers in a row, after which more of them are compared at once
_LARGEST_GUESS = 1 << 20  # records in one comparison


class Frames(NamedTuple):
    """The offsets and lengths of the records of a file, and its damage."""

    offsets: np.ndarray  # int64, of each frame
    lengths: np.ndarray  # int64, of the data of each
    damages: tuple[DamagedRecordError, ...]


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
    _check_uncompressed(path)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: is not a regular file, so it has no random access")
    frames = load_sidecar(path, status, on_damage, max_record_bytes) if sidecar else None
    if frames is None:
        frames = walk_frames(path, on_damage, max_record_bytes)
        if sidecar and _is_unchanged(path, status):
            save_sidecar(path, status, on_damage, frames, max_record_bytes)
    _check_lengths(path, frames, max_record_bytes)
    return RecordIndex(
        path, frames.offsets, frames.lengths, status.st_size, status.st_mtime_ns, frames.damages
    )


def _check_lengths(path: Path, frames: Frames, limit: int) -> None:
    long = frames.lengths > limit
    if long.any():
        number = int(long.argmax())
        reason = TOO_LONG.format(length=frames.lengths[number], limit=limit)
        raise DamagedRecordError(path, number, int(frames.offsets[number]), reason)


def _check_uncompressed(path: Path) -> None:
    if compression := detect_compression(path):
        command = shlex.join(["ftrain", "data", "convert", str(path), str(plain_name(path))])
        raise ValueError(
            f"{path}: is compressed ({compression}), and random access needs a plain file; "
            f"make one with `{command}` and remove this one, "
            "or pass cache=DIRECTORY to unpack it there"
        )


def _is_unchanged(path: Path, status: os.stat_result) -> bool:
    """Return False if the file changed while it was read: its sidecar would be incomplete."""
    now = os.stat(path)
    return (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def walk_frames(path: Path, on_damage: OnDamage, max_record_bytes: int) -> Frames:
    """Return the frames of a plain file; with `on_damage="skip"` all data are verified."""
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
            length = known[header] = _parse_length(path, header, len(offsets), at)
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


def _parse_length(path: Path, header: bytes, number: int, at: int) -> int:
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


def sidecar_path(path: Path) -> Path:
    """Return the path of the sidecar of a record file."""
    return path.with_name(path.name + SIDECAR_SUFFIX)


def load_sidecar(
    path: Path,
    status: os.stat_result,
    on_damage: OnDamage,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Frames | None:
    """Return the frames of the record file `path` from its sidecar; None if that is unusable."""
    try:
        content = _read_sidecar(sidecar_path(path), status.st_size)
        return _parse_sidecar(path, content, status, on_damage, max_record_bytes)
    # With any error in the sidecar, the index is built again.
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error):
        return None


def save_sidecar(
    path: Path,
    status: os.stat_result,
    on_damage: OnDamage,
    frames: Frames,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> None:
    """Write the sidecar of a file if possible; without it the index is built again."""
    target = sidecar_path(path)
    if not stat.S_ISREG(status.st_mode) or (os.path.lexists(target) and not is_sidecar(target)):
        return  # not a regular file, or the name belongs to another file
    # Several processes may index a file at once: each writes its own file, and the last one wins.
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.writing")
    with suppress(OSError), replacing(target, temporary):
        temporary.write_bytes(_format_sidecar(path, status, on_damage, frames, max_record_bytes))


def remove_sidecar(path: Path) -> None:
    """Remove the sidecar of a file that is replaced; another file of that name stays."""
    sidecar = sidecar_path(path)
    if is_sidecar(sidecar):
        sidecar.unlink()


def is_sidecar(path: str | Path) -> bool:
    """Return True if a file is a sidecar, whether or not its record file still exists."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _format_sidecar(
    path: Path, status: os.stat_result, on_damage: OnDamage, frames: Frames, limit: int
) -> bytes:
    header = {
        **file_identity(path, status),
        "count": len(frames.offsets),
        "mode": on_damage,
        "damages": [[damage.number, damage.offset, damage.reason] for damage in frames.damages],
    }
    if limit != MAX_RECORD_BYTES:
        header["max_record_bytes"] = limit
    text = json.dumps(header).encode()
    arrays = [values.astype("<i8").tobytes() for values in (frames.offsets, frames.lengths)]
    content = b"".join([_MAGIC, _UINT32.pack(len(text)), text, *arrays])
    return content + _UINT32.pack(google_crc32c.value(content))


def file_identity(path: Path, status: os.stat_result) -> dict[str, int]:
    """Return the values that identify the contents of a file; a sidecar stores them."""
    with open(path, "rb") as file:
        head = file.read(_EDGE)
        file.seek(max(status.st_size - _EDGE, 0))
        tail = file.read(_EDGE)
    crcs = {"head_crc": google_crc32c.value(head), "tail_crc": google_crc32c.value(tail)}
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, **crcs}


def _read_sidecar(sidecar: Path, size: int) -> bytes:
    status = os.stat(sidecar)
    # A sidecar takes 16 bytes for each record of at least 16 bytes, and under 100 for each damage.
    if not stat.S_ISREG(status.st_mode) or status.st_size > 8 * size + (1 << 20):
        raise ValueError("not a sidecar of this file")
    return sidecar.read_bytes()


def _parse_sidecar(
    path: Path, content: bytes, status: os.stat_result, on_damage: OnDamage, limit: int
) -> Frames | None:
    start = len(_MAGIC) + _UINT32.size
    if not content.startswith(_MAGIC) or _UINT32.unpack(content[-4:])[0] != google_crc32c.value(
        content[:-4]
    ):
        return None
    end = start + _UINT32.unpack_from(content, len(_MAGIC))[0]
    header = json.loads(content[start:end])
    if any(header[name] != value for name, value in file_identity(path, status).items()):
        return None
    offsets, lengths = (
        np.frombuffer(content[end:-4], "<i8").astype(np.int64).reshape(2, header["count"])
    )
    damages = tuple(_damage(path, *entry) for entry in header["damages"])
    frames = Frames(offsets, lengths, damages)
    if on_damage == "skip" and header.get("max_record_bytes", MAX_RECORD_BYTES) != limit:
        return None  # a different limit makes different records damaged
    usable = header["mode"] == on_damage or (
        on_damage == "raise" and header["mode"] == "skip" and not damages
    )
    return frames if usable and _is_consistent(frames, status.st_size) else None


def _damage(path: Path, number: int, offset: int, reason: str) -> DamagedRecordError:
    if not (isinstance(number, int) and isinstance(offset, int) and isinstance(reason, str)):
        raise TypeError("not the entry of a damaged record")
    return DamagedRecordError(path, number, offset, reason)


def _is_consistent(frames: Frames, size: int) -> bool:
    """Return True if the records are in order in the file, without gaps unless it is damaged."""
    offsets = frames.offsets
    lengths = frames.lengths
    # Check each value alone first, so that no sum overflows.
    if ((offsets < 0) | (offsets > size) | (lengths < 0) | (lengths > size)).any():
        return False
    gaps = np.append(offsets, size) - np.append(0, offsets + lengths + FRAME)
    return bool((gaps >= 0).all() if frames.damages else (gaps == 0).all())
