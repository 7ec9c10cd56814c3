"""Write record files, single or in shards, that get their final names once they are complete.

with RecordWriter("train.tfrecord", shard_records=10_000) as writer:
    writer.write(example.SerializeToString())
"""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from ftrain.formats.records.encoding import (
    Codec,
    Compression,
    DeflatedFile,
    check_compression,
    frame_record,
    suffix_compression,
)
from ftrain.formats.records.index import remove_sidecar
from ftrain.paths import expanded
from ftrain.storage import sync

WRITING = ".writing"  # suffix of incomplete files


class RecordWriter:
    """Writes records to `path`, or to shards of it named like train-00000-of-00003.tfrecord.

    `compression` "auto" follows the suffix, .gz or .zlib; None writes plain files.

    A new shard starts after `shard_records` records, or before the record that would exceed
    `shard_bytes` (uncompressed, including frames). Until `close` the files end in ".writing"; after
    an exception in the `with` block they keep that name, unless `discard` removes them. After
    `close`, `paths` lists the files.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        compression: Compression = "auto",
        shard_records: int | None = None,
        shard_bytes: int | None = None,
        overwrite: bool = False,
    ):
        check_compression(compression)
        _check_limits(shard_records, shard_bytes)
        self.path = Path(expanded(path))
        self.paths: list[Path] = []
        self._codec: Codec | None = (
            suffix_compression(self.path) if compression == "auto" else compression
        )
        self._records_limit = shard_records
        self._bytes_limit = shard_bytes
        self._names = _ShardNames(
            self.path, sharded=shard_records is not None or shard_bytes is not None
        )
        self._names.check_free(overwrite)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._closed = False
        self._failed = False
        self._shards = 0
        self._lock = _lock_file(self._names.unfinished(0))
        try:
            self._names.check_free(overwrite)  # again: another writer may have finished since
            self._names.remove_unfinished(keep=self._names.unfinished(0))
            self._begin_shard()
        except BaseException:  # also Ctrl-C: nothing was written yet, so nothing stays
            self._names.unfinished(0).unlink(missing_ok=True)
            _unlock_file(self._lock)
            raise

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append one record."""
        if self._closed:
            raise ValueError(
                f"{self.path}: the writer is closed; write before close(), or within the with block"
            )
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(
                f"{self.path}: a record must be bytes, got {type(data).__name__}; "
                "pass text.encode() or example.SerializeToString()"
            )
        try:
            self._append(frame_record(bytes(data)))
        except BaseException:  # the file may end in part of a record, so do not publish it
            self._failed = True
            raise

    def close(self) -> None:
        """Complete the files and rename them, replacing those of an earlier write."""
        if self._closed:
            return
        if self._failed:
            self._abandon()
            raise ValueError(
                f"{self.path}: not complete, as a write failed; the files end in {WRITING}"
            )
        self._closed = True
        try:
            self._end_shard()
            self.paths = self._names.publish(self._shards)
        finally:
            _unlock_file(self._lock)

    def discard(self) -> None:
        """Remove what was written and keep earlier files; after `close` do nothing."""
        if self._closed:
            return
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self._file.close()
        self._names.remove_unfinished(keep=self._names.unfinished(0))
        self._names.unfinished(0).unlink(missing_ok=True)
        self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            self._abandon()

    def _abandon(self) -> None:
        """Close the files and leave them incomplete."""
        self._closed = True
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self._file.close()
        _unlock_file(self._lock)

    def _is_full(self, size: int) -> bool:
        if not self._records:  # a shard holds at least one record, of any length
            return False
        if self._records_limit is not None and self._records >= self._records_limit:
            return True
        return self._bytes_limit is not None and self._bytes + size > self._bytes_limit

    def _append(self, frame: bytes) -> None:
        if self._is_full(len(frame)):
            self._end_shard()
            self._begin_shard()
        self._output.write(frame)
        self._records += 1
        self._bytes += len(frame)

    def _begin_shard(self) -> None:
        path = self._names.unfinished(self._shards)
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - _end_shard closes it
        self._output = self._file if self._codec is None else DeflatedFile(self._file, self._codec)
        self._records = 0
        self._bytes = 0
        self._shards += 1

    def _end_shard(self) -> None:
        with self._file:
            if isinstance(self._output, DeflatedFile):
                self._output.finish()
            self._file.flush()
            os.fsync(self._file.fileno())


class _ShardNames:
    """The names of the files of one write, and of the files that they replace."""

    def __init__(self, path: Path, *, sharded: bool):
        self._path = path
        self._sharded = sharded
        self._suffix = _suffix(path)
        self._stem = path.name.removesuffix(self._suffix)

    def unfinished(self, shard: int) -> Path:
        """Return the name of an incomplete file."""
        part = f"-{shard:05d}" if self._sharded else ""
        return self._path.with_name(f"{self._stem}{part}{self._suffix}{WRITING}")

    def remove_unfinished(self, keep: Path) -> None:
        """Remove incomplete files of earlier writers; raise if one is still writing."""
        for path in self._existing(r"-\d{5,}", WRITING):
            if path != keep:
                lock = _lock_file(path)
                path.unlink()
                _unlock_file(lock)

    def check_free(self, overwrite: bool) -> None:
        """Raise if the target is a directory, or exists without `overwrite`."""
        if not self._sharded and self._path.is_dir():
            raise IsADirectoryError(f"{self._path}: is a directory; give the name of a file in it")
        if not overwrite and (earlier := self._earlier()):
            more = f" and {len(earlier) - 1} more" if len(earlier) > 1 else ""
            raise FileExistsError(
                f"{earlier[0]}{more}: exists already; pass overwrite=True to replace it"
            )

    def publish(self, shards: int) -> list[Path]:
        """Rename the complete files and remove those of earlier writes; return the names."""
        earlier = self._earlier()
        names = [self._final(shard, shards) for shard in range(shards)]
        # The shards of two writes must never exist together, so the earlier ones are removed first:
        # all new ones are complete by now. A single file is replaced atomically.
        for path in [*earlier, *names]:
            remove_sidecar(path)
        for path in earlier if self._sharded else []:
            path.unlink()
        for shard, name in enumerate(names):
            self.unfinished(shard).replace(name)
        sync(self._path.parent)
        return names

    def _final(self, shard: int, shards: int) -> Path:
        part = f"-{shard:05d}-of-{shards:05d}" if self._sharded else ""
        return self._path.with_name(f"{self._stem}{part}{self._suffix}")

    def _earlier(self) -> list[Path]:
        return self._existing(r"-\d{5,}-of-\d{5,}", "")

    def _existing(self, part: str, ending: str) -> list[Path]:
        part = part if self._sharded else ""
        pattern = re.compile(re.escape(self._stem) + part + re.escape(self._suffix + ending))
        if not self._path.parent.is_dir():
            return []
        return sorted(path for path in self._path.parent.iterdir() if pattern.fullmatch(path.name))


def _lock_file(path: Path) -> BinaryIO:
    """Create and lock the first file of a write, to keep out a second writer."""
    while True:
        file = open(path, "ab")  # noqa: SIM115 - _unlock_file closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FileExistsError(
                f"{path}: exists already, and is being written by another writer; "
                "wait for it, or choose another name"
            ) from None
        # The writer that held the lock may have renamed the file in the meantime.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
        file.close()


def _unlock_file(lock: BinaryIO) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process may still have it open
    lock.close()


def _suffix(path: Path) -> str:
    """Return the suffix, with the one before that of a compression, as in ".tfrecord.gz"."""
    if suffix_compression(path) is None:
        return path.suffix
    return path.with_suffix("").suffix + path.suffix


def _check_limits(shard_records: int | None, shard_bytes: int | None) -> None:
    for name, limit in (("shard_records", shard_records), ("shard_bytes", shard_bytes)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, or None for no limit, got {limit}")
