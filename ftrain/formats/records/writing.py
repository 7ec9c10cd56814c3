"""Writing record files: one, or shards of it, that get their names once they are complete.

with RecordWriter("train.tfrecord", shard_records=10_000) as writer:
    writer.write(example.SerializeToString())
"""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

from ftrain.formats.records.compression import SUFFIXES, WINDOW_BITS, DeflatedFile
from ftrain.formats.records.framing import frame_record
from ftrain.formats.records.sidecar import remove_sidecar
from ftrain.formats.whole_files import sync
from ftrain.paths import expanded

WRITING = ".writing"  # ends the names of files that are not complete


class RecordWriter:
    """Writes records to `path`, or to shards of it named like train-00000-of-00003.tfrecord.

    They are compressed if the suffix says so, .gz or .zlib, or as `compression` says; None is plain.

    A new shard begins after `shard_records` records, or before the record that would take it beyond `shard_bytes`
    (frames included, uncompressed). Until `close` everything is in files that end in ".writing"; if the block is left
    by an exception they stay so, unless `discard` removes them. `paths` are the files, once closed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        compression: Literal["auto", "GZIP", "ZLIB"] | None = "auto",
        shard_records: int | None = None,
        shard_bytes: int | None = None,
        overwrite: bool = False,
    ):
        _check(compression, shard_records, shard_bytes)
        self.path = Path(expanded(path))
        self.paths: list[Path] = []
        self._compression = (
            SUFFIXES.get(self.path.suffix.lower()) if compression == "auto" else compression
        )
        self._records_limit, self._bytes_limit = shard_records, shard_bytes
        self._names = _Names(
            self.path, sharded=shard_records is not None or shard_bytes is not None
        )
        self._names.check_free(overwrite)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._closed, self._failed, self._shards = False, False, 0
        self._lock = _hold(self._names.unfinished(0))
        try:
            self._names.check_free(overwrite)  # again: another writer may have ended since
            self._names.remove_unfinished(but=self._names.unfinished(0))
            self._begin_shard()
        except BaseException:
            _release(self._lock)
            raise

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends one record."""
        if self._closed:
            raise ValueError(
                f"{self.path}: the writer is closed; write before close(), or within the with block"
            )
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(
                f"{self.path}: a record must be bytes, got {type(data).__name__}; "
                "pass what text.encode() or example.SerializeToString() give"
            )
        try:
            self._append(frame_record(bytes(data)))
        except BaseException:  # part of it may be in the file, so that file must not get its name
            self._failed = True
            raise

    def close(self) -> None:
        """Completes the files and gives them their names; those of an earlier write go then."""
        if self._closed:
            return
        if self._failed:
            self._leave()
            raise ValueError(
                f"{self.path}: not complete, as a write failed; what there is ends in {WRITING}"
            )
        self._closed = True
        try:
            self._end_shard()
            self.paths = self._names.publish(self._shards)
        finally:
            _release(self._lock)

    def discard(self) -> None:
        """Gives up: what was written goes, and what was there before stays. After `close` it does nothing."""
        if self._closed:
            return
        with suppress(OSError):  # of a disk that is full: it would be written to once more
            self._file.close()
        self._names.remove_unfinished(but=self._names.unfinished(0))
        self._names.unfinished(0).unlink(missing_ok=True)
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            self._leave()

    def _leave(self) -> None:
        """Gives the files up as they are."""
        self._closed = True
        with suppress(OSError):  # of a disk that is full: it would be written to once more
            self._file.close()
        _release(self._lock)

    def _is_full(self, size: int) -> bool:
        if not self._records:  # a shard holds a record at least, however long
            return False
        if self._records_limit is not None and self._records >= self._records_limit:
            return True
        return self._bytes_limit is not None and self._bytes + size > self._bytes_limit

    def _append(self, frame: bytes) -> None:
        if self._is_full(len(frame)):
            self._end_shard()
            self._begin_shard()
        self._output.write(frame)
        self._records, self._bytes = self._records + 1, self._bytes + len(frame)

    def _begin_shard(self) -> None:
        self._file: BinaryIO = open(self._names.unfinished(self._shards), "wb")  # noqa: SIM115 - _end_shard closes it
        self._output = (
            self._file if self._compression is None else DeflatedFile(self._file, self._compression)
        )
        self._records, self._bytes, self._shards = 0, 0, self._shards + 1

    def _end_shard(self) -> None:
        with self._file:
            if isinstance(self._output, DeflatedFile):
                self._output.finish()
            self._file.flush()
            os.fsync(self._file.fileno())


class _Names:
    """The files of one write: those that it makes, and those of earlier writes that they replace."""

    def __init__(self, path: Path, *, sharded: bool):
        self._path, self._sharded = path, sharded
        self._suffix = _suffix(path)
        self._stem = path.name.removesuffix(self._suffix)

    def unfinished(self, shard: int) -> Path:
        part = f"-{shard:05d}" if self._sharded else ""
        return self._path.with_name(f"{self._stem}{part}{self._suffix}{WRITING}")

    def remove_unfinished(self, but: Path) -> None:
        """Removes what earlier writers have left; an error if one is still at it."""
        for path in self._existing(r"-\d{5,}", WRITING):
            if path != but:
                lock = _hold(path)
                path.unlink()
                _release(lock)

    def check_free(self, overwrite: bool) -> None:
        if not self._sharded and self._path.is_dir():
            raise IsADirectoryError(f"{self._path}: is a directory; give the name of a file in it")
        if not overwrite and (earlier := self._earlier()):
            more = f" and {len(earlier) - 1} more" if len(earlier) > 1 else ""
            raise FileExistsError(
                f"{earlier[0]}{more}: exists already; pass overwrite=True to replace it"
            )

    def publish(self, shards: int) -> list[Path]:
        earlier = self._earlier()
        names = [self._final(shard, shards) for shard in range(shards)]
        # Shards of two writes must never lie side by side, so those of the earlier one go first: all new ones are
        # complete by now. A single file is replaced at once.
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


def _hold(path: Path) -> BinaryIO:
    """Makes and locks the first file of a write, as long as it is written: two writers would mix up their files."""
    while True:
        file = open(path, "ab")  # noqa: SIM115 - _release closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FileExistsError(
                f"{path}: exists already, and is being written by another writer; wait for it, or choose another name"
            ) from None
        # The writer that had it may have given it its final name in between.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
        file.close()


def _release(lock: BinaryIO) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open too
    lock.close()


def _suffix(path: Path) -> str:
    """The suffix, together with the one before that of a compression: ".tfrecord.gz"."""
    packed = path.suffix.lower() in SUFFIXES
    return path.with_suffix("").suffix + path.suffix if packed else path.suffix


def _check(compression: str | None, shard_records: int | None, shard_bytes: int | None) -> None:
    if compression not in (None, "auto", *WINDOW_BITS):
        raise ValueError(
            f'compression is {compression!r}; it must be "auto", "GZIP", "ZLIB" or None'
        )
    for name, limit in (("shard_records", shard_records), ("shard_bytes", shard_bytes)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} is {limit}; it must be at least 1, or None for no limit")
