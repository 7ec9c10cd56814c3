"""Files of records: the files that patterns match, and random access to their records.

files = RecordFiles("data/train-*.tfrecord")
first, last = files.read([0, len(files) - 1])
"""

import fnmatch
import glob
import hashlib
import json
import mmap
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import google_crc32c
import numpy as np

from ftrain.formats.records.encoding import (
    DATA_WRONG,
    FRAME,
    HEADER,
    HEADER_WRONG,
    MAX_RECORD_BYTES,
    ByteStream,
    Compression,
    DamagedRecordError,
    StreamError,
    check_compression,
    mask_crcs,
    masked_length_crcs,
)
from ftrain.formats.records.index import (
    SIDECAR_SUFFIX,
    RecordIndex,
    file_identity,
    index_records,
    is_sidecar,
)
from ftrain.formats.records.reading import CHUNK, OnDamage, check_on_damage, read_records
from ftrain.formats.records.writing import WRITING
from ftrain.paths import absolute, expanded
from ftrain.storage import is_directory, list_names, replacing, retry
from ftrain.suggestions import nearest

MAX_OPEN = 128  # mapped files; each holds a file descriptor
_MAX_COPIED_FRAME = 4096  # bytes; longer frames are not copied together


class RecordFiles:
    """The records of `files`, paths or patterns as for `match_files`, numbered from 0.

    `on_damage="skip"` reads everything once for the index, leaves out damaged records and lists
    them in `damages`. `verify` verifies the data of each record whenever it is read. Compressed
    files are unpacked into the directory `cache`, once. Several threads may read concurrently. A
    record above `max_record_bytes` (256 MiB by default) counts as damaged.
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
        # Absolute, because the working directory may change.
        self._plain = [absolute(index.path) for index in indices]
        self._packed = [index.path != path for index, path in zip(indices, self.paths, strict=True)]
        self._marks = [(index.size, index.mtime_ns) for index in indices]
        self._damaged_at = [[damage.offset for damage in index.damages] for index in indices]
        # The running number of each file's first record, and the total.
        self._starts = np.cumsum([0, *(len(index) for index in indices)])
        self._offsets = np.concatenate([index.offsets for index in indices])
        self._lengths = np.concatenate([index.lengths for index in indices])
        self._maps = MappedFiles()

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, numbers: np.ndarray | Sequence[int]) -> list[bytes]:
        """Return the records with these numbers, in this order."""
        rows = self._check_numbers(numbers)
        if not len(rows):
            return []
        lengths = self._lengths[rows]
        data, places = self._collect(rows, lengths)
        self._raise_at(
            _find_wrong_headers(data, places, lengths.astype(np.uint64)), rows, HEADER_WRONG
        )
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
        """Return the file and the number of a record in it, for messages."""
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
                f"there is no record {rows[wrong][0]}: "
                f"{len(self.paths)} files hold {len(self)} records"
            )
        return rows.astype(np.int64)

    def _collect(
        self, rows: np.ndarray, lengths: np.ndarray
    ) -> tuple[mmap.mmap | bytes, np.ndarray]:
        """Return bytes that hold the frames of these records, and the offsets of the frames."""
        files = np.searchsorted(self._starts, rows, side="right") - 1
        offsets = self._offsets[rows]
        sizes = lengths + FRAME
        if (files == files[0]).all():
            return _collect_near(self._map(int(files[0])), offsets, sizes)
        order = np.argsort(files, kind="stable")
        # The loop over files does little, because there may be as many files as records.
        begins = offsets[order].tolist()
        ends = (offsets + sizes)[order].tolist()
        bounds = [0, *(np.flatnonzero(np.diff(files[order])) + 1).tolist(), len(rows)]
        frames = []
        for first, end in pairwise(bounds):
            view = self._map(int(files[order[first]]))
            frames += [view[a:b] for a, b in zip(begins[first:end], ends[first:end], strict=True)]
        places = np.empty_like(offsets)
        places[order] = np.cumsum(sizes[order]) - sizes[order]
        return b"".join(frames), places

    def _map(self, file: int) -> mmap.mmap:
        return self._maps.get(self._plain[file], *self._marks[file])

    def _locate(self, row: int) -> tuple[int, int]:
        """Return the file of a record and its number there, counting damaged ones too."""
        file = int(np.searchsorted(self._starts, row, side="right")) - 1
        before = sum(offset < self._offsets[row] for offset in self._damaged_at[file])
        return file, row - int(self._starts[file]) + before

    def _raise_at(self, wrong: np.ndarray, rows: np.ndarray, reason: str) -> None:
        if wrong.any():
            row = int(rows[wrong.argmax()])
            file, number = self._locate(row)
            offset = int(self._offsets[row])
            packed = self._packed[file]
            raise DamagedRecordError(self.paths[file], number, offset, reason, uncompressed=packed)


def _index(
    path: Path,
    on_damage: OnDamage,
    sidecar: bool,
    cache: str | Path | None,
    compression: Compression,
    max_record_bytes: int,
) -> RecordIndex:
    """Return the index of a file, or of its plain copy; errors name the file itself."""
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
        raise _with_path(path, damage) from None
    return replace(index, damages=tuple(_with_path(path, damage) for damage in index.damages))


def _with_path(source: Path, damage: DamagedRecordError) -> DamagedRecordError:
    return DamagedRecordError(
        source, damage.number, damage.offset, damage.reason, uncompressed=True
    )


def _collect_near(
    view: mmap.mmap, offsets: np.ndarray, sizes: np.ndarray
) -> tuple[mmap.mmap | bytes, np.ndarray]:
    """Return the frames of one file; frames of similar size in one copy, padded to equal size.

    Slicing scattered records from the map waits for the disk once per record; one copy waits once.
    """
    width = int(sizes.max())
    if width > _MAX_COPIED_FRAME or width * len(sizes) > 2 * int(sizes.sum()):
        return view, offsets
    # Near the end of the file the copy starts before the record.
    starts = np.minimum(offsets, len(view) - width)
    frames = np.ndarray(len(view) - width + 1, f"V{width}", view, 0, (1,))[starts]
    return frames.tobytes(), np.arange(len(starts)) * width + (offsets - starts)


def _find_wrong_headers(
    data: mmap.mmap | bytes, places: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    wrong = _gather(data, places, "<u8") != lengths
    return wrong | (_gather(data, places + 8, "<u4") != masked_length_crcs(lengths))


def _gather(data: mmap.mmap | bytes, places: np.ndarray, dtype: str) -> np.ndarray:
    """Return the numbers at these byte offsets, aligned or not."""
    count = len(data) - np.dtype(dtype).itemsize + 1
    return np.ndarray(count, dtype, data, 0, (1,))[places]


class MappedFiles:
    """Memory maps of unchanging files; the least recently used are dropped. Thread-safe."""

    def __init__(self) -> None:
        self._maps: OrderedDict[Path, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    # A copy in another process opens its own maps.
    def __reduce__(self) -> tuple:
        return MappedFiles, ()

    def get(self, path: Path, size: int, mtime_ns: int) -> mmap.mmap:
        """Return the map of a file that has this size and time; it stays valid for the caller."""
        now = os.stat(path)
        # Reading a mapped page that the file no longer has would kill the process.
        if (now.st_size, now.st_mtime_ns) != (size, mtime_ns):
            raise ValueError(
                f"{path}: was changed while in use: it has {now.st_size} bytes and had {size} "
                "when it was indexed, or its modification time is new; open the files again"
            )
        with self._lock:
            found = self._maps.get(path) or _map(path)
            self._maps[path] = found
            self._maps.move_to_end(path)
            while len(self._maps) > MAX_OPEN:
                self._maps.popitem(last=False)  # not closed: another thread may read it
        return found


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def unpack(path: Path, cache: str | Path, compression: Compression, on_damage: OnDamage) -> Path:
    """Return a plain copy of the current contents of a compressed file, kept in `cache`."""
    target = Path(cache) / _copy_name(path)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may unpack a file at once: each writes its own file, the last one wins.
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.writing")
    with replacing(target, temporary):
        _inflate(path, temporary, compression, on_damage)
    return target


def _copy_name(path: Path) -> str:
    key = json.dumps({"path": os.path.abspath(path)} | file_identity(path, os.stat(path)))
    return f"{path.name[:100]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.tfrecord"


def _inflate(path: Path, target: Path, compression: Compression, on_damage: OnDamage) -> None:
    with ByteStream(path, compression) as stream, open(target, "xb") as file:
        try:
            while data := stream.read(CHUNK):
                file.write(data)
        except StreamError:
            if on_damage == "raise":
                _raise_damage(path, compression)
            # A stream cut between two records would look complete; an extra byte marks the damage.
            file.write(b"\0")


def _raise_damage(path: Path, compression: Compression) -> None:
    """Read the file as records, which raises an error with the number of the record."""
    for _ in read_records(path, compression=compression, verify=False):
        pass


def match_files(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that paths and glob patterns, including **, match.

    The files are in the order of the entries, sorted within a pattern, each file once. Patterns
    match neither directories nor sidecars nor unfinished files. A path that exists is never used as
    a pattern.
    """
    entries = [files] if isinstance(files, str | Path) else list(files)
    if not entries:
        raise ValueError("files is empty; give at least one path or pattern")
    found: dict[str, Path] = {}
    for entry in entries:
        for path in _match(expanded(entry)):
            found.setdefault(os.fspath(absolute(path)), path)
    return list(found.values())


def _match(entry: str) -> list[Path]:
    if os.path.isdir(entry):
        raise IsADirectoryError(
            f"{entry}: is a directory; for all the files in it write {os.path.join(entry, '*')}"
        )
    if os.path.lexists(entry):
        return [Path(entry)]
    if not glob.has_magic(entry):
        raise FileNotFoundError(f"{entry}: there is no such file; {_describe_directory(entry)}")
    matches = sorted(retry(lambda: _expand(entry)))
    if paths := [Path(match) for match in matches if _is_data(match)]:
        return paths
    left_out = f" but {len(matches)} that are directories, indices or unfinished" if matches else ""
    raise FileNotFoundError(f"{entry}: matches no file{left_out}; {_describe_directory(entry)}")


def _expand(pattern: str) -> list[str]:
    """Expand like `glob.glob(pattern, recursive=True)`, but raise if a listing fails."""
    head, tail = os.path.split(pattern)
    parents = [head]
    if glob.has_magic(head):
        parents = [path for path in _expand(head) if is_directory(Path(path or "."))]
    if tail == "**":
        return [path for parent in parents for path in _below(parent)]
    if not glob.has_magic(tail):
        return [path for parent in parents if os.path.lexists(path := os.path.join(parent, tail))]
    return [
        os.path.join(parent, name)
        for parent in parents
        for name in fnmatch.filter(_visible(parent, tail), tail)
    ]


def _below(directory: str) -> list[str]:
    """Return a directory, and everything below it except hidden names."""
    found = [os.path.join(directory, "")]
    for name in _visible(directory):
        path = os.path.join(directory, name)
        found += _below(path) if is_directory(Path(path)) else [path]
    return found


def _visible(directory: str, pattern: str = "") -> list[str]:
    """Return the names for a wildcard: hidden ones only if the pattern starts with a dot."""
    return [
        name
        for name in list_names(Path(directory or "."))
        if not name.startswith(".") or pattern.startswith(".")
    ]


def _is_data(path: str) -> bool:
    if os.path.isdir(path) or path.endswith(WRITING):
        return False
    if not path.endswith(SIDECAR_SUFFIX):
        return True
    return not (os.path.exists(path.removesuffix(SIDECAR_SUFFIX)) or is_sidecar(path))


def _describe_directory(entry: str) -> str:
    """Describe the directory in which nothing was found."""
    directory = os.path.dirname(entry)
    while glob.has_magic(directory):
        directory = os.path.dirname(directory)
    shown = directory or "."
    if not os.path.isdir(shown):
        return f"its directory {shown} does not exist"
    names = [item.name for item in os.scandir(shown) if not item.is_dir()]
    similar = nearest(os.path.basename(entry), names)
    hint = f", the nearest name is {similar[0]}" if similar else ""
    return f"{shown} has {len(names)} {'file' if len(names) == 1 else 'files'}{hint}"
