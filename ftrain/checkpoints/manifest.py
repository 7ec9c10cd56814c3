"""The manifest of a checkpoint: what every file and every leaf of it must be."""

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import ml_dtypes  # noqa: F401 - it makes bfloat16 and its like known to numpy
import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from ftrain.checkpoints.digests import crc32c_of_text
from ftrain.checkpoints.errors import DamagedError, in_one_line
from ftrain.checkpoints.snapshot import Index
from ftrain.formats.whole_files import read_whole, write_whole
from ftrain.storage import is_file, raise_if_transient

NAME = "manifest.json"
MARK: dict[str, Any] = {"ftrain": {"manifest": NAME}}  # in the metadata of Orbax: there must be one
MAX_BYTES = 1 << 28  # of a manifest, by default; 256 MiB
_LARGEST = 1 << 62  # bytes of a leaf
_LONGEST_NAME = 255  # bytes of a name in a directory


def _inside(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise ValueError(f"file {name!r} is not inside of the checkpoint")
    if max(len(os.fsencode(part)) for part in parts) > _LONGEST_NAME:
        raise ValueError(f"file {name[:40]!r}... has a name of more than {_LONGEST_NAME} bytes")
    return name


def check_time(seconds: float) -> float:
    """Return seconds since 1970 as they are; ValueError if they are NaN, infinite or beyond the calendar."""
    try:
        datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{seconds} is not a time in seconds since 1970") from None
    return seconds


def _known(name: str) -> str:
    try:
        return np.dtype(name).name
    except TypeError:
        raise ValueError(f"dtype {name!r} is not known") from None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class File(_Strict):
    size: NonNegativeInt
    crc32c: str


class Leaf(_Strict):
    """A leaf as it is stored; `pieces` are the parts of it that were digested, by their places in it."""

    shape: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, max_length=64)]
    dtype: Annotated[str, AfterValidator(_known)]
    pieces: dict[str, str]
    key: str | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Manifest(_Strict):
    step: NonNegativeInt
    time: Annotated[float, AfterValidator(check_time)]  # when it was taken, in seconds since 1970
    metrics: dict[str, float]
    not_finite: list[str]  # leaves that make it suspect
    leaves: dict[str, Leaf]
    files: dict[Annotated[str, AfterValidator(_inside)], File]
    extra: dict[str, Any] | None = None  # as `extra.encode` returns it; older checkpoints have none

    def as_text(self) -> str:
        """The file. Without extra values it is what it was before there were any."""
        return as_text(self.model_dump(exclude={"extra"} if self.extra is None else None))

    def write(self, directory: Path) -> None:
        write_whole(directory / NAME, self.as_text())


def read_manifest(directory: Path, *, max_bytes: int = MAX_BYTES) -> Manifest | None:
    """The manifest of a checkpoint, of up to `max_bytes`; None if none was ever written, as by plain Orbax."""
    path = directory / NAME
    if not is_file(path):
        if _was_promised(directory):
            raise DamagedError(directory, [f"file {NAME} is missing"])
        return None
    try:
        text = read_whole(path, max_bytes).decode()
        contents = json.loads(text)["manifest"]
        manifest = Manifest.model_validate(contents)
        if text != as_text(contents):
            raise ValueError("its checksum is wrong")
        for name, leaf in manifest.leaves.items():
            if leaf.bytes > _LARGEST:
                raise ValueError(f"leaf {name} cannot have the shape {list(leaf.shape)}")
            if not covers(leaf):
                raise ValueError(f"leaf {name} has digests of other places than its own")
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise_if_transient(error, path)
        raise DamagedError(directory, [f"file {NAME}: {_reason(error)}"]) from error
    return manifest


def covers(leaf: Leaf) -> bool:
    """Whether the pieces of a leaf are inside of it, and as large together as it is."""
    if 0 in leaf.shape:
        return True
    size = 0
    for index in map(parse_place, leaf.pieces):
        if any(
            not 0 <= part.start < part.stop <= side
            for part, side in zip(index, leaf.shape, strict=True)
        ):
            return False
        size += math.prod(part.stop - part.start for part in index)
    return size == math.prod(leaf.shape)


def whole(shape: tuple[int, ...]) -> str:
    """The place of a piece that is a whole leaf."""
    return place_of(tuple(slice(0, size) for size in shape), shape)


def place_of(index: Index, shape: tuple[int, ...]) -> str:
    """The place of a piece in a leaf, as text: "0:2,0:3" are the first two rows of three columns."""
    spans = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop, _ in spans)


def parse_place(place: str) -> Index:
    """The index that a place stands for."""
    spans = [span.split(":") for span in place.split(",")] if place else []
    return tuple(slice(int(start), int(stop)) for start, stop in spans)


def _was_promised(directory: Path) -> bool:
    try:
        said = json.loads(read_whole(directory / "_CHECKPOINT_METADATA", MAX_BYTES))
        return "ftrain" in said["custom_metadata"]
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, RecursionError):
        return False


def as_text(contents: Mapping[str, Any]) -> str:
    """A manifest as it is written: always in the same way, so that every byte of the file is known."""
    body = json.dumps(contents, sort_keys=True, allow_nan=False)  # NaN and Infinity are not JSON
    return f'{{"crc32c": "{crc32c_of_text(body)}",\n"manifest": {body}}}\n'


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'/'.join(map(str, first['loc'])):.80}: {first['msg']:.200}"
    return in_one_line(error)
