"""The index of a record file: where each of its records lies, for reading them in any order."""

import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ftrain.formats.records.compression import detect_compression
from ftrain.formats.records.framing import MAX_RECORD_BYTES, TOO_LONG, DamagedRecordError
from ftrain.formats.records.reading import OnDamage, check_max_record_bytes, check_on_damage
from ftrain.formats.records.sidecar import load_sidecar, save_sidecar
from ftrain.formats.records.walking import Frames, walk_frames


@dataclass(frozen=True, eq=False)
class RecordIndex:
    """The records of the plain file `path` as it was when it had this size and time of change."""

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
    """The index of a plain record file, from its sidecar PATH.index if that is up to date, else from the file itself.

    "raise" follows the headers and leaves the data unread: a damaged header is an error. "skip" reads everything once
    and leaves damaged records out. With `sidecar` the index is kept beside the file, where that is possible. A record
    of more than `max_record_bytes` (256 MiB by default) counts as damaged.
    """
    check_on_damage(on_damage)
    check_max_record_bytes(max_record_bytes)
    path = Path(path)
    _refuse_compressed(path)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: is no regular file, and only those can be read in any order")
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
            f"{path}: is compressed ({compression}), and random access needs a plain file; make one with "
            f"`{command}` and remove this one, or pass cache=DIRECTORY to have it "
            "unpacked there"
        )


def _plain_name(path: Path) -> Path:
    """A name for the plain file that is not taken by the compressed one."""
    name = path.with_suffix(".tfrecord" if path.with_suffix("").suffix != ".tfrecord" else "")
    return name if name != path else path.with_suffix(".plain.tfrecord")


def _unchanged(path: Path, status: os.stat_result) -> bool:
    """A file that grew while it was read would get a sidecar that knows part of it."""
    now = os.stat(path)
    return (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
