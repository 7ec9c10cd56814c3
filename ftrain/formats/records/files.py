"""Random access to the records of many files by one running number.

files = RecordFiles("data/train-*.tfrecord")
first, last = files.read([0, len(files) - 1])
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from mmap import mmap
from pathlib import Path

import google_crc32c
import numpy as np

from ftrain.formats.checksums import mask_crcs, masked_length_crcs
from ftrain.formats.records.compression import ByteStream, Compression, check_compression
from ftrain.formats.records.framing import (
    DATA_WRONG,
    FRAME,
    HEADER,
    HEADER_WRONG,
    MAX_RECORD_BYTES,
    DamagedRecordError,
)
from ftrain.formats.records.indexing import RecordIndex, index_records
from ftrain.formats.records.mapping import MappedFiles
from ftrain.formats.records.patterns import match_files
from ftrain.formats.records.reading import OnDamage, check_on_damage
from ftrain.formats.records.unpacking import unpack
from ftrain.paths import absolute

_WIDEST = 4096  # frames up to here are copied together


class RecordFiles:
    """The records of `files`, paths and patterns as `match_files` takes them, numbered through from 0.

    `on_damage="skip"` reads everything once, when it is indexed, and leaves damaged records out: `damages` has them.
    `verify` checks the data of each record whenever it is read. Compressed files are unpacked into the directory
    `cache`, once. Several threads may read at the same time. A record of more than `max_record_bytes` (256 MiB by
    default) counts as damaged.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        *,
        on_damage: OnDamage = "raise",
        verify: bool = True,
        sidecar: bool = True,
        cache: str | Path | None = None,
        compression: Compression = "auto",
        max_record_bytes: int = MAX_RECORD_BYTES,
    ):
        check_on_damage(on_damage)
        check_compression(compression)
        self.paths = match_files(files)
        self._verify = verify
        indices = [
            _index(path, on_damage, sidecar, cache, compression, max_record_bytes)
            for path in self.paths
        ]
        self.damages = [damage for index in indices for damage in index.damages]
        self._plain = [
            absolute(index.path) for index in indices
        ]  # whatever the working directory becomes
        self._packed = [index.path != path for index, path in zip(indices, self.paths, strict=True)]
        self._marks = [(index.size, index.mtime_ns) for index in indices]
        self._damaged_at = [[damage.offset for damage in index.damages] for index in indices]
        # The running number of each file's first record, and the number of all.
        self._starts = np.cumsum([0, *(len(index) for index in indices)])
        self._offsets = np.concatenate([index.offsets for index in indices])
        self._lengths = np.concatenate([index.lengths for index in indices])
        self._maps = MappedFiles()

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, numbers: np.ndarray | Sequence[int]) -> list[bytes]:
        """The records with these numbers, in this order."""
        rows = self._check_numbers(numbers)
        if not len(rows):
            return []
        lengths = self._lengths[rows]
        data, places = self._collect(rows, lengths)
        self._raise_at(_wrong_headers(data, places, lengths.astype(np.uint64)), rows, HEADER_WRONG)
        begins = places + HEADER.size
        ends = begins + lengths
        records = [
            data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        ]
        if self._verify:
            crcs = np.fromiter(map(google_crc32c.value, records), np.uint32, len(records))
            self._raise_at(mask_crcs(crcs) != _gather(data, ends, "<u4"), rows, DATA_WRONG)
        return records

    def where(self, number: int) -> str:
        """The file and the place in it of a record, for messages."""
        (row,) = self._check_numbers([number])
        file, number_in_file = self._locate(int(row))
        return f"{self.paths[file]}: record {number_in_file}"

    def _check_numbers(self, numbers: np.ndarray | Sequence[int]) -> np.ndarray:
        rows = np.asarray(numbers)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iuO"):
            raise TypeError(
                f"record numbers must be integers in one dimension, got {rows.dtype} {rows.shape}"
            )
        wrong = (rows < 0) | (rows >= len(self))
        if wrong.any():
            raise IndexError(
                f"there is no record {rows[wrong][0]}: {len(self.paths)} files hold {len(self)} records"
            )
        return rows.astype(np.int64)

    def _collect(self, rows: np.ndarray, lengths: np.ndarray) -> tuple[mmap | bytes, np.ndarray]:
        """Bytes that hold the frames of these records, and the places of the frames in them."""
        files = np.searchsorted(self._starts, rows, side="right") - 1
        offsets, sizes = self._offsets[rows], lengths + FRAME
        if (files == files[0]).all():
            return _collect_near(self._map(int(files[0])), offsets, sizes)
        order = np.argsort(files, kind="stable")
        # All that can be done for all files at once is, as there may be as many files as records.
        begins, ends = offsets[order].tolist(), (offsets + sizes)[order].tolist()
        bounds = [0, *(np.flatnonzero(np.diff(files[order])) + 1).tolist(), len(rows)]
        frames = []
        for first, end in pairwise(bounds):
            view = self._map(int(files[order[first]]))
            frames += [view[a:b] for a, b in zip(begins[first:end], ends[first:end], strict=True)]
        places = np.empty_like(offsets)
        places[order] = np.cumsum(sizes[order]) - sizes[order]
        return b"".join(frames), places

    def _map(self, file: int) -> mmap:
        return self._maps.get(self._plain[file], *self._marks[file])

    def _locate(self, row: int) -> tuple[int, int]:
        """The file of a record and its number there as `read_records` counts, with those that are damaged."""
        file = int(np.searchsorted(self._starts, row, side="right")) - 1
        before = sum(offset < self._offsets[row] for offset in self._damaged_at[file])
        return file, row - int(self._starts[file]) + before

    def _raise_at(self, wrong: np.ndarray, rows: np.ndarray, reason: str) -> None:
        if wrong.any():
            row = int(rows[wrong.argmax()])
            file, number = self._locate(row)
            offset, packed = int(self._offsets[row]), self._packed[file]
            raise DamagedRecordError(self.paths[file], number, offset, reason, uncompressed=packed)


def _index(
    path: Path,
    on_damage: OnDamage,
    sidecar: bool,
    cache: str | Path | None,
    compression: Compression,
    max_record_bytes: int,
) -> RecordIndex:
    """The index of a file, or of its plain copy; damage is told of the file itself."""
    with ByteStream(path, compression) as stream:
        packed = stream.compression is not None
    if cache is None or not packed:
        return index_records(
            path, on_damage=on_damage, sidecar=sidecar, max_record_bytes=max_record_bytes
        )
    plain = unpack(path, cache, compression, on_damage)
    try:
        index = index_records(
            plain, on_damage=on_damage, sidecar=sidecar, max_record_bytes=max_record_bytes
        )
    except DamagedRecordError as damage:
        raise _told_of(path, damage) from None
    return replace(index, damages=tuple(_told_of(path, damage) for damage in index.damages))


def _told_of(source: Path, damage: DamagedRecordError) -> DamagedRecordError:
    return DamagedRecordError(
        source, damage.number, damage.offset, damage.reason, uncompressed=True
    )


def _collect_near(
    view: mmap, offsets: np.ndarray, sizes: np.ndarray
) -> tuple[mmap | bytes, np.ndarray]:
    """The frames of one file: where their sizes are much the same, in one copy of as many bytes for each.

    Records all over a large file are waited for one by one if each is sliced from the map; in one copy, together.
    """
    width = int(sizes.max())
    if width > _WIDEST or width * len(sizes) > 2 * int(sizes.sum()):
        return view, offsets
    starts = np.minimum(
        offsets, len(view) - width
    )  # near the end of the file it begins before the record
    frames = np.ndarray(len(view) - width + 1, f"V{width}", view, 0, (1,))[starts]
    return frames.tobytes(), np.arange(len(starts)) * width + (offsets - starts)


def _wrong_headers(data: mmap | bytes, places: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    wrong = _gather(data, places, "<u8") != lengths
    return wrong | (_gather(data, places + 8, "<u4") != masked_length_crcs(lengths))


def _gather(data: mmap | bytes, places: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers that lie at these bytes, aligned or not."""
    count = len(data) - np.dtype(dtype).itemsize + 1
    return np.ndarray(count, dtype, data, 0, (1,))[places]
