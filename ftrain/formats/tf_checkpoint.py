"""TensorFlow checkpoints, `PREFIX.index` and `PREFIX.data-*`, read without TensorFlow."""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from google.protobuf import text_format

from ftrain.formats.records.encoding import mask_crc
from ftrain.formats.tf_bundle import (
    BundleEntry,
    check_tiling,
    message_class,
    object_keys,
    parse_message,
    read_table,
    read_varint,
    slice_box,
    slice_key,
)
from ftrain.paths import PathError, expanded
from ftrain.storage import is_file, raise_if_transient, read_whole
from ftrain.suggestions import suggest

_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VERSION = 1  # of the format, the latest supported one
MAX_INDEX_BYTES = 1 << 28  # default limit; an index has about 100 bytes per variable
_MAX_STATE = 1 << 24  # bytes of a file named checkpoint
_CHUNK = 1 << 20
# Text whose escapes are all known: protobuf would pass others to Python, which warns.
_KNOWN_ESCAPES = re.compile(
    r"""(?:[^\\]|\\(?:[abfnrtvxuU\\'"]|[0-3][0-7]{0,2}|[4-7][0-7]?(?![0-7])))*"""
)


class TfCheckpointError(ValueError):
    """A checkpoint whose files are missing, damaged or unsupported."""


class TfVariable(NamedTuple):
    """The shape and dtype of a variable."""

    shape: tuple[int, ...]
    dtype: str  # as numpy or ml_dtypes name it; "string" for bytes of any length


class TfCheckpointState(NamedTuple):
    """The contents of the file `checkpoint`: the latest checkpoint, and all kept ones by age."""

    latest: str | None
    all: tuple[str, ...]


class TfCheckpoint:
    """A checkpoint of `tf.train.Saver` or `tf.train.Checkpoint`; opening it reads the index only.

    `variables` has the shape and dtype of each variable, sorted by name; a partitioned variable
    counts as one. An index above `max_index_bytes` (256 MiB by default) is an error.
    """

    variables: Mapping[str, TfVariable]

    def __init__(self, prefix: str | Path, *, max_index_bytes: int = MAX_INDEX_BYTES):
        try:
            self._prefix = expanded(prefix)
        except PathError as error:
            raise TfCheckpointError(
                f"{error}; no such file; the prefix of a checkpoint is a local path"
            ) from None
        self._index = f"{self._prefix}.index"
        try:
            table = read_table(_read_index(self._index, max_index_bytes))
            self._shards = _read_header(next(table, None))
            self._entries = {key: BundleEntry.parse(key, value) for key, value in table}
            self.variables = MappingProxyType(_list_variables(self._entries))
        except ValueError as error:
            raise TfCheckpointError(f"{self._index}: {error}") from None

    def read(self, name: str, *, verify: bool = True) -> np.ndarray:
        """Return the value of a variable, strings as `bytes` objects; `verify` its checksum."""
        if name not in self.variables:
            hint = suggest(name, self.variables, 3) or f" among its {len(self.variables)}"
            raise _UnknownVariableError(f"{self._index}: no variable {name!r}{hint}")
        entry = self._entries[name.encode()]
        try:
            if entry.proto.slices:
                return self._read_slices(name, entry, verify)
            return _read_tensor(entry, self._locate(entry), verify)
        except (ValueError, OSError) as error:
            raise_if_transient(error, self._index)
            raise TfCheckpointError(f"{self._index}: variable {name!r}: {error}") from None

    def objects(self) -> dict[str, str]:
        """Return the path of each saved object, such as model/layers/0, and its variable's name.

        Only object-based checkpoints have them. An optimizer's slot is at model/w/optimizer/m.
        """
        if _OBJECT_GRAPH not in self.variables:
            return {}
        found = self.variables[_OBJECT_GRAPH]
        if found != TfVariable((), "string"):
            raise TfCheckpointError(
                f"{self._index}: {_OBJECT_GRAPH} is {found}, expected a single string"
            )
        graph = self.read(_OBJECT_GRAPH).item()
        try:
            return object_keys(graph)
        except ValueError as error:
            raise TfCheckpointError(f"{self._index}: {_OBJECT_GRAPH}: {error}") from None

    def _locate(self, entry: BundleEntry) -> "_Span":
        """Return the place of the bytes of a tensor; ValueError if they are missing."""
        entry.check_size()
        shard = entry.proto.shard_id
        offset = entry.proto.offset
        size = entry.proto.size
        if not 0 <= shard < self._shards:
            raise ValueError(f"it is in data file {shard}, expected less than {self._shards}")
        path = f"{self._prefix}.data-{shard:05d}-of-{self._shards:05d}"
        if not os.path.isfile(path):
            raise ValueError(f"its data file is missing: {path}")
        file_size = os.path.getsize(path)
        if offset < 0 or offset + size > file_size:
            raise ValueError(
                f"it takes bytes {offset} to {offset + size} of {path}, which has {file_size}"
            )
        return _Span(path, file_size, offset, size)

    def _read_slices(self, name: str, whole: BundleEntry, verify: bool) -> np.ndarray:
        boxes = [slice_box(part, whole.shape) for part in whole.proto.slices]
        parts = [self._find_slice(name, whole, part) for part in whole.proto.slices]
        spans = [self._locate(part) for part in parts]
        for part, box in zip(parts, boxes, strict=True):
            expected = tuple(side.stop - side.start for side in box)
            if part.shape != expected:
                raise ValueError(f"its slice has shape {part.shape}, expected {expected}")
        _check_room(spans)
        check_tiling(whole.shape, boxes)
        tensor = np.empty(whole.shape, whole.numpy_dtype())
        for part, span, box in zip(parts, spans, boxes, strict=True):
            tensor[box] = _read_tensor(part, span, verify)
        return tensor

    def _find_slice(self, name: str, whole: BundleEntry, part: Any) -> BundleEntry:
        key = slice_key(name, part)
        entry = self._entries.get(key)
        if entry is None:
            raise ValueError(f"its slice with key {key!r} is missing")
        if entry.dtype != whole.dtype or entry.proto.slices:
            raise ValueError(
                f"its slice with key {key!r} is sliced again, or of dtype {entry.dtype}, "
                f"not {whole.dtype}"
            )
        return entry


def is_tf_checkpoint(prefix: str | Path) -> bool:
    """Return True if a TensorFlow checkpoint with this prefix exists."""
    return is_file(Path(f"{os.fspath(prefix)}.index"))


def latest_tf_checkpoint(directory: str | Path) -> Path | None:
    """Return the latest prefix in `directory/checkpoint`; None if it or its index is missing."""
    path = Path(directory) / "checkpoint"
    if not is_file(path):
        return None
    try:
        latest = parse_state(read_whole(path, _MAX_STATE).decode()).latest
    except (ValueError, OSError) as error:
        raise_if_transient(error, path)
        raise TfCheckpointError(f"{path}: {error}") from None
    prefix = Path(directory) / latest if latest else None
    return prefix if prefix and is_tf_checkpoint(prefix) else None


def parse_state(text: str) -> TfCheckpointState:
    """Parse the text of a file named `checkpoint`."""
    state = message_class("CheckpointState")()
    try:
        if not _KNOWN_ESCAPES.fullmatch(text):
            raise ValueError("it has a backslash before a character that needs none")
        text_format.Parse(text, state)
    except (text_format.ParseError, ValueError) as error:
        raise TfCheckpointError(f"not the text of a checkpoint state: {error}") from None
    return TfCheckpointState(
        state.model_checkpoint_path or None, tuple(state.all_model_checkpoint_paths)
    )


def format_state(latest: str, all: Sequence[str]) -> str:
    """Return the text of a file named `checkpoint` as TensorFlow writes it, `latest` last."""
    kept = [*all] if all and all[-1] == latest else [*all, latest]
    state = message_class("CheckpointState")(
        model_checkpoint_path=latest, all_model_checkpoint_paths=kept
    )
    return text_format.MessageToString(state, as_utf8=True)


class _UnknownVariableError(TfCheckpointError, KeyError):
    __str__ = Exception.__str__  # KeyError's would put the sentence in quotes


class _Span(NamedTuple):
    path: str
    file_size: int
    offset: int
    size: int


def _read_index(path: str, max_bytes: int) -> bytes:
    if not is_file(Path(path)):
        raise ValueError(
            "no such file; the prefix of a checkpoint is the path of its index without .index"
        )
    try:
        return read_whole(Path(path), max_bytes)
    except OSError as error:
        raise_if_transient(error, path)
        raise ValueError(f"it cannot be read: {error}") from None


def _read_header(first: tuple[bytes, bytes] | None) -> int:
    """Return the number of data files from the first entry, the header."""
    if first is None or first[0] != b"":
        raise ValueError("it has no header, which is an entry with an empty key")
    header = parse_message("BundleHeaderProto", first[1])
    if header.endianness != 0:
        raise ValueError(
            "it was saved on a big-endian machine; "
            "save it again with TensorFlow on a little-endian one"
        )
    if header.version.min_consumer > _VERSION:
        raise ValueError(
            f"it has format version {header.version.min_consumer}, expected at most {_VERSION}"
        )
    if header.num_shards < 1:
        raise ValueError(f"it has {header.num_shards} data files, expected at least 1")
    return header.num_shards


def _list_variables(entries: Mapping[bytes, BundleEntry]) -> dict[str, TfVariable]:
    variables = {}
    for key, entry in entries.items():
        if not key.startswith(b"\0"):  # as the keys of slices do
            try:
                variables[key.decode()] = TfVariable(entry.shape, entry.dtype)
            except UnicodeDecodeError:
                raise ValueError(f"key {key!r} is not UTF-8") from None
    return variables


def _check_room(spans: Sequence[_Span]) -> None:
    """Raise if slices share bytes: the tensor could be larger than the files."""
    sizes = Counter()
    for span in spans:
        sizes[span.path] += span.size
        if sizes[span.path] > span.file_size:
            raise ValueError(
                f"its slices have more bytes together than {span.path}, which has {span.file_size}"
            )


def _read_tensor(entry: BundleEntry, span: _Span, verify: bool) -> np.ndarray:
    data = np.fromfile(span.path, np.uint8, span.size, offset=span.offset)
    if len(data) != span.size:
        raise ValueError(
            f"{span.path} became shorter while it was read: got {len(data)} of {span.size} bytes"
        )
    if entry.dtype == "string":
        tensor, crc = _split_strings(data.tobytes(), math.prod(entry.shape), verify)
    else:
        # numpy cannot work with bool bytes other than 0 and 1.
        tensor = data != 0 if entry.dtype == "bool" else data.view(entry.numpy_dtype())
        crc = _crc(data) if verify else 0
    if verify and mask_crc(crc) != entry.proto.crc32c:
        where = f"bytes {span.offset} to {span.offset + span.size} of {span.path}"
        raise ValueError(f"it is damaged: the checksum of {where} does not match")
    return tensor.reshape(entry.shape)


def _split_strings(data: bytes, count: int, verify: bool) -> tuple[np.ndarray, int]:
    """Decode lengths, their checksum and bytes; return the strings and the total checksum."""
    strings = np.empty(count, object)
    if not data:
        return strings, 0
    lengths = []
    at = 0
    for _ in range(count):
        length, at = read_varint(data, at)
        lengths.append(length)
    end = at + 4 + sum(lengths)
    if end != len(data):
        raise ValueError(f"it is damaged: its strings take {end} bytes, but it has {len(data)}")
    # The checksum is of the lengths as 4 or 8 bytes, not of the varints in the file.
    crc = google_crc32c.value(
        b"".join(length.to_bytes(4 if length < 1 << 32 else 8, "little") for length in lengths)
    )
    if verify and data[at : at + 4] != mask_crc(crc).to_bytes(4, "little"):
        raise ValueError("it is damaged: the checksum of the lengths of its strings does not match")
    start = at + 4
    for place, length in enumerate(lengths):
        strings[place] = data[start : start + length]
        start += length
    return strings, google_crc32c.extend(crc, data[at:])


def _crc(data: np.ndarray) -> int:
    crc = 0
    for at in range(0, len(data), _CHUNK):
        crc = google_crc32c.extend(crc, data[at : at + _CHUNK].tobytes())
    return crc
