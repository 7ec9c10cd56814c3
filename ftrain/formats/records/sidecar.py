"""Sidecars: the index of a record file, kept in a file beside it.

A sidecar has a magic string, the length of the JSON header as uint32, the JSON header, offsets and
lengths as int64, and the CRC-32C of all of that as uint32, each little-endian. A sidecar with any
error is ignored.
"""

import json
import os
import stat
import struct
import uuid
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from ftrain.formats.records.framing import FRAME, MAX_RECORD_BYTES, DamagedRecordError
from ftrain.formats.records.reading import OnDamage

SUFFIX = ".index"
_MAGIC = b"ftrain records 1"
_UINT32 = struct.Struct("<I")
_EDGE = 4096  # bytes at both ends of a record file whose checksums identify it


class Frames(NamedTuple):
    """Where the records of a file lie, and its damage."""

    offsets: np.ndarray  # int64, of each frame
    lengths: np.ndarray  # int64, of the data of each
    damages: tuple[DamagedRecordError, ...]


def sidecar_path(path: Path) -> Path:
    """Return the path of the sidecar of a record file."""
    return path.with_name(path.name + SUFFIX)


def load_sidecar(
    path: Path,
    status: os.stat_result,
    on_damage: OnDamage,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Frames | None:
    """Return the frames of the record file `path` from its sidecar; None if that is unusable."""
    try:
        return _parse(
            path, _read(sidecar_path(path), status.st_size), status, on_damage, max_record_bytes
        )
    # The index is built again, whatever is wrong with the sidecar.
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
    # Several processes may index a file at once: each writes its own, and the last one wins.
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.writing")
    try:
        temporary.write_bytes(_format(path, status, on_damage, frames, max_record_bytes))
        temporary.replace(target)
    except OSError:
        _remove(temporary)


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


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the directory is not writable, so there is nothing to remove


def _format(
    path: Path, status: os.stat_result, on_damage: OnDamage, frames: Frames, limit: int
) -> bytes:
    header = {
        **identity(path, status),
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


def identity(path: Path, status: os.stat_result) -> dict[str, int]:
    """Return what must match for a sidecar to belong to this file."""
    with open(path, "rb") as file:
        head = file.read(_EDGE)
        file.seek(max(status.st_size - _EDGE, 0))
        tail = file.read(_EDGE)
    crcs = {"head_crc": google_crc32c.value(head), "tail_crc": google_crc32c.value(tail)}
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, **crcs}


def _read(sidecar: Path, size: int) -> bytes:
    status = os.stat(sidecar)
    # A sidecar takes 16 bytes for each record of at least 16 bytes, and under 100 for each damage.
    if not stat.S_ISREG(status.st_mode) or status.st_size > 8 * size + (1 << 20):
        raise ValueError("not a sidecar of this file")
    return sidecar.read_bytes()


def _parse(
    path: Path, content: bytes, status: os.stat_result, on_damage: OnDamage, limit: int
) -> Frames | None:
    start = len(_MAGIC) + _UINT32.size
    if not content.startswith(_MAGIC) or _UINT32.unpack(content[-4:])[0] != google_crc32c.value(
        content[:-4]
    ):
        return None
    end = start + _UINT32.unpack_from(content, len(_MAGIC))[0]
    header = json.loads(content[start:end])
    if any(header[name] != value for name, value in identity(path, status).items()):
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
    return frames if usable and _is_sound(frames, status.st_size) else None


def _damage(path: Path, number: int, offset: int, reason: str) -> DamagedRecordError:
    if not (isinstance(number, int) and isinstance(offset, int) and isinstance(reason, str)):
        raise TypeError("not a damage")
    return DamagedRecordError(path, number, offset, reason)


def _is_sound(frames: Frames, size: int) -> bool:
    """Return True if the records lie in the file in order, without gaps unless it is damaged."""
    offsets = frames.offsets
    lengths = frames.lengths
    # Each alone first, so that no sum overflows.
    if ((offsets < 0) | (offsets > size) | (lengths < 0) | (lengths > size)).any():
        return False
    gaps = np.append(offsets, size) - np.append(0, offsets + lengths + FRAME)
    return bool((gaps >= 0).all() if frames.damages else (gaps == 0).all())
