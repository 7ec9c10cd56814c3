"""The manifest of a checkpoint: what every file and leaf must be, and verification against it.

It also holds extra values: a small mapping, as strict JSON.
"""

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import google_crc32c
import ml_dtypes  # noqa: F401 - it makes bfloat16 and its like known to numpy
import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from ftrain.checkpoints.errors import CheckpointError, DamagedError, summarize_error
from ftrain.checkpoints.matching import describe_leaf
from ftrain.checkpoints.orbax_layout import (
    COMMITTED,
    Specs,
    is_checkpoint,
    leaf_specs,
    open_leaves,
)
from ftrain.checkpoints.snapshot import Index, digest_of, in_parallel
from ftrain.paths import local_path
from ftrain.storage import (
    exists,
    is_file,
    list_files,
    raise_if_transient,
    read_whole,
    retry,
    write_text,
)

MANIFEST_FILE = "manifest.json"
# In the metadata of Orbax: this checkpoint must have a manifest.
ORBAX_METADATA: dict[str, Any] = {"ftrain": {"manifest": MANIFEST_FILE}}
MAX_BYTES = 1 << 28  # of a manifest, by default; 256 MiB
_MAX_LEAF_BYTES = 1 << 62
_MAX_NAME_BYTES = 255  # of a file name
_FILE_CHUNK = 1 << 20  # bytes read at a time: few enough to stay in the processor's cache
_FLOAT = "$float"  # {"$float": "inf"} stands for a number that JSON cannot express


def _check_file_name(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise ValueError(f"file {name!r} is not inside the checkpoint")
    if max(len(os.fsencode(part)) for part in parts) > _MAX_NAME_BYTES:
        raise ValueError(f"file {name[:40]!r}... has a name of more than {_MAX_NAME_BYTES} bytes")
    return name


def check_time(seconds: float) -> float:
    """Return seconds since 1970 unchanged; ValueError if they are not a date of the calendar."""
    try:
        datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{seconds} is not a time in seconds since 1970") from None
    return seconds


def _check_dtype(name: str) -> str:
    try:
        return np.dtype(name).name
    except TypeError:
        raise ValueError(f"dtype {name!r} is not known") from None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class File(_Strict):
    """The size and checksum of a file."""

    size: NonNegativeInt
    crc32c: str


class Leaf(_Strict):
    """A stored leaf; `pieces` maps the index of each part, as text, to the digest of its values."""

    shape: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, max_length=64)]
    dtype: Annotated[str, AfterValidator(_check_dtype)]
    pieces: dict[str, str]
    key: str | None = None  # the implementation of a random key

    @property
    def bytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Manifest(_Strict):
    """The contents of `manifest.json`."""

    step: NonNegativeInt
    time: Annotated[float, AfterValidator(check_time)]  # of the snapshot, in seconds since 1970
    metrics: dict[str, float]
    not_finite: list[str]  # names of the non-finite leaves that make it suspect
    leaves: dict[str, Leaf]
    files: dict[Annotated[str, AfterValidator(_check_file_name)], File]
    extra: dict[str, Any] | None = None  # as `encode_extra` returns it; older checkpoints have none

    def as_text(self) -> str:
        """Return the text of the file. Without extra values it has no key for them."""
        return format_manifest(self.model_dump(exclude={"extra"} if self.extra is None else None))

    def write(self, directory: Path) -> None:
        """Write the file, atomically."""
        write_text(directory / MANIFEST_FILE, self.as_text())


def read_manifest(directory: Path, *, max_bytes: int = MAX_BYTES) -> Manifest | None:
    """Read the manifest of a checkpoint; None if it never had one, because plain Orbax wrote it."""
    path = directory / MANIFEST_FILE
    if not is_file(path):
        if _must_have_manifest(directory):
            raise DamagedError(directory, [f"file {MANIFEST_FILE} is missing"])
        return None
    try:
        text = read_whole(path, max_bytes).decode()
        contents = json.loads(text)["manifest"]
        manifest = Manifest.model_validate(contents)
        if text != format_manifest(contents):
            raise ValueError("its checksum is wrong")
        for name, leaf in manifest.leaves.items():
            if leaf.bytes > _MAX_LEAF_BYTES:
                raise ValueError(f"leaf {name} cannot have the shape {list(leaf.shape)}")
            if not _covers(leaf):
                raise ValueError(f"leaf {name} has digests of other places than its own")
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise_if_transient(error, path)
        raise DamagedError(
            directory, [f"file {MANIFEST_FILE}: {_describe_error(error)}"]
        ) from error
    return manifest


def format_manifest(contents: Mapping[str, Any]) -> str:
    """Return the text of a manifest. It is canonical, so every byte of the file can be checked."""
    body = json.dumps(contents, sort_keys=True, allow_nan=False)  # NaN and Infinity are not JSON
    return f'{{"crc32c": "{crc32c_of_text(body)}",\n"manifest": {body}}}\n'


def verify(directory: str | Path) -> list[str]:
    """Return everything that is wrong with a checkpoint, by file and by leaf; [] if it is intact.

    A checkpoint that plain Orbax wrote has no manifest; of it, only unreadable leaves are reported.
    """
    directory = local_path(directory)
    if not is_checkpoint(directory):
        raise CheckpointError(f"{directory} is not a checkpoint")
    return retry(lambda: _find_damage(directory))


def find_wrong_files(directory: Path, manifest: Manifest) -> list[str]:
    """Return what is wrong with the names and sizes of files; no file is read."""
    found = list_files(directory)
    found.pop(MANIFEST_FILE, None)
    expected = manifest.files
    wrong = [f"file {name} is missing" for name in expected if name not in found]
    wrong += [f"file {name} is unexpected" for name in found if name not in expected]
    wrong += [
        f"file {name} has {found[name]} bytes, expected {file.size}"
        for name, file in expected.items()
        if name in found and found[name] != file.size
    ]
    if directory.name.isdecimal() and manifest.step != int(directory.name):
        wrong.append(f"file {MANIFEST_FILE} is of step {manifest.step}")
    return wrong


def find_wrong_checksums(
    directory: Path, manifest: Manifest, sizes: range | None = None
) -> list[str]:
    """Return the files, or those of certain sizes, whose bytes are not those that were written."""

    def check(name: str) -> str | None:
        try:
            found = crc32c_of(directory / name)
        except OSError as error:
            raise_if_transient(error, directory / name)
            return f"file {name} cannot be read: {error.strerror}"
        expected = manifest.files[name].crc32c
        if found == expected:
            return None
        return f"file {name} has crc32c {found}, expected {expected}"

    files = [name for name, file in manifest.files.items() if sizes is None or file.size in sizes]
    existing = [name for name in files if is_file(directory / name)]
    return [wrong for wrong in in_parallel(check, existing) if wrong]


def has_saved_values(value: np.ndarray, leaf: Leaf) -> bool:
    """Return True if the digests of `value` are those saved for the leaf."""
    whole = format_index(whole_index(leaf.shape), leaf.shape)
    return all(
        digest_of(value if index == whole else value[parse_index(index)]) == digest
        for index, digest in leaf.pieces.items()
    )


def crc32c_of(path: Path) -> str:
    """Return the crc32c of a file as eight hexadecimal digits."""
    value = 0
    chunk: Any = np.empty(_FILE_CHUNK, np.uint8)  # a buffer, which its stubs do not declare
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            value = google_crc32c.extend(value, chunk[:count])
    return f"{value:08x}"


def crc32c_of_text(text: str) -> str:
    """Return the crc32c of a text in UTF-8 as eight hexadecimal digits."""
    return f"{google_crc32c.value(text.encode()):08x}"


def format_index(index: Index, shape: tuple[int, ...]) -> str:
    """Return the index of a piece as text: "0:2,0:3" is the first two rows of three columns."""
    spans = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop, _ in spans)


def parse_index(text: str) -> Index:
    """Return the index that `format_index` was given."""
    spans = [span.split(":") for span in text.split(",")] if text else []
    return tuple(slice(int(start), int(stop)) for start, stop in spans)


def whole_index(shape: tuple[int, ...]) -> Index:
    """Return the index of a whole leaf."""
    return tuple(slice(0, size) for size in shape)


def encode_extra(value: Any, name: str = "extra") -> Any:
    """Return `value` as JSON can express it; CheckpointError names what cannot be stored.

    >>> encode_extra({"best": float("-inf"), "looks": 3})
    {'best': {'$float': '-inf'}, 'looks': 3}
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a scalar of numpy or jax
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, (list, tuple)):
        return [encode_extra(each, f"{name}/{place}") for place, each in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _check_key(key, name): encode_extra(each, f"{name}/{key}")
            for key, each in value.items()
        }
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which cannot be stored beside a checkpoint's leaves; "
        "expected numbers, strings, booleans, None, lists or mappings"
    )


def decode_extra(value: Any) -> Any:
    """Return what `encode_extra` was given, with lists in place of tuples."""
    if isinstance(value, list):
        return [decode_extra(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    return {key: decode_extra(each) for key, each in value.items()}


def _check_key(key: Any, name: str) -> str:
    if not isinstance(key, str) or key == _FLOAT:
        raise CheckpointError(
            f"{name} has the key {key!r}; expected a string other than {_FLOAT!r}"
        )
    return key


def _must_have_manifest(directory: Path) -> bool:
    try:
        metadata = json.loads(read_whole(directory / "_CHECKPOINT_METADATA", MAX_BYTES))
        return "ftrain" in metadata["custom_metadata"]
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _covers(leaf: Leaf) -> bool:
    """Return True if the pieces of a leaf are inside it and have its size in total."""
    if 0 in leaf.shape:
        return True
    size = 0
    for index in map(parse_index, leaf.pieces):
        if any(
            not 0 <= part.start < part.stop <= side
            for part, side in zip(index, leaf.shape, strict=True)
        ):
            return False
        size += math.prod(part.stop - part.start for part in index)
    return size == math.prod(leaf.shape)


def _describe_error(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'/'.join(map(str, first['loc'])):.80}: {first['msg']:.200}"
    return summarize_error(error)


def _find_damage(directory: Path) -> list[str]:
    wrong: list[str] = []
    try:
        manifest = read_manifest(directory)
        if manifest is None:
            return _find_unreadable(directory)
        wrong = find_wrong_files(directory, manifest)
        wrong += find_wrong_checksums(directory, manifest)
        return wrong + _find_wrong_leaves(directory, manifest)
    except DamagedError as error:
        return wrong or error.damage


def _find_unreadable(directory: Path) -> list[str]:
    """Return what cannot be read of a checkpoint without a manifest."""
    wrong: list[str] = []
    if not exists(directory / COMMITTED):
        wrong.append(f"file {COMMITTED} is missing: it was never finished")
    specs = leaf_specs(directory)
    return wrong + _check_leaves(directory, specs, dict.fromkeys(specs))


def _find_wrong_leaves(directory: Path, manifest: Manifest) -> list[str]:
    """Return the leaves whose values are not those that were saved, each read by itself."""
    specs = leaf_specs(directory)
    stored = {name: leaf for name, leaf in manifest.leaves.items() if 0 not in leaf.shape}
    wrong = [f"leaf {name} is missing" for name in stored if name not in specs]
    wrong += [f"leaf {name} is unexpected" for name in specs if name not in stored]
    readable = {name: leaf for name, leaf in stored.items() if name in specs}
    return wrong + _check_leaves(directory, specs, readable)


def _check_leaves(directory: Path, specs: Specs, leaves: Mapping[str, Leaf | None]) -> list[str]:
    """Return what is wrong with leaves; None stands for a leaf without a manifest."""

    def check(name: str) -> str | None:
        leaf = leaves[name]
        try:
            found = open_leaves(directory, specs, [name])[name]
            if leaf is not None and describe_leaf(found) != describe_leaf(leaf):
                return f"leaf {name} is {describe_leaf(found)}, expected {describe_leaf(leaf)}"
            value = found.read()
            if leaf is None or has_saved_values(value, leaf):
                return None
            return f"leaf {name} has other values than were saved"
        except DamagedError as error:
            return error.damage[0]
        except ValueError as error:
            raise_if_transient(error, directory)
            return f"leaf {name} cannot be read: {summarize_error(error)}"

    return [wrong for wrong in in_parallel(check, leaves) if wrong]
