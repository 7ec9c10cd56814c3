"""The files of Orbax: start to write them, and read the leaves of a checkpoint one by one.

Orbax stores every leaf as a zarr array, and reads it through tensorstore. ftrain reads through
tensorstore directly: single leaves in any order, and two to four times as fast.
"""

import atexit
import functools
import json
import logging
import math
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from ftrain.checkpoints.errors import CheckpointError, DamagedError, summarize_error
from ftrain.checkpoints.snapshot import Index
from ftrain.storage import exists, is_directory, list_names, raise_if_transient, read_whole
from ftrain.tree import Tree

COMMITTED = "commit_success.txt"  # Orbax writes it last
_METADATA = "_METADATA"
_EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")  # values without files
MAX_LEAF_BYTES = "FTRAIN_MAX_LEAF_BYTES"  # environment variable: the largest leaf to read
_DEFAULT_MAX_LEAF_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_MAX_METADATA = 1 << 28  # bytes
_NO_CACHE = {"cache_pool": {"total_bytes_limit": 0}}  # every leaf is read once

Specs = dict[str, dict[str, Any]]


class OrbaxSave(Protocol):
    """An Orbax save in progress."""

    def result(self) -> object:
        """Wait until it is written; raises its error if it failed."""
        ...


class StoredLeaf(NamedTuple):
    """A leaf on disk."""

    shape: tuple[int, ...]
    dtype: np.dtype
    array: ts.TensorStore

    @property
    def bytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def start_reading(self, index: Index = ()) -> Any:
        """Return a future of its values, or of those at an index; every read goes through here.

        Raises ValueError if the values need more bytes than FTRAIN_MAX_LEAF_BYTES, by default the
        memory of this machine: a damaged or forged file can declare any shape, and a leaf of zeros
        needs no bytes on disk.
        """
        part = self.array[index] if index else self.array
        chunk = [size or 1 for size in self.array.chunk_layout.read_chunk.shape or ()]
        limit, origin = max_leaf_bytes()
        for what, shape in (("it", part.shape), ("a chunk of it", chunk)):
            if (size := math.prod(shape) * self.dtype.itemsize) > limit:
                raise ValueError(
                    f"{what} would have {size} bytes, expected at most {limit} ({origin})"
                )
        return part.read()

    def read(self, index: Index = ()) -> np.ndarray:
        """Return its values, or those at an index."""
        return self.start_reading(index).result()


def max_leaf_bytes() -> tuple[int, str]:
    """Return the largest number of bytes to read at once, and where the limit comes from."""
    value = os.environ.get(MAX_LEAF_BYTES)
    if value is None:
        return (
            _DEFAULT_MAX_LEAF_BYTES,
            f"the memory of this machine; set {MAX_LEAF_BYTES} to change it",
        )
    if not value.isdecimal() or int(value) == 0:
        raise CheckpointError(f"{MAX_LEAF_BYTES} is {value!r}, expected an integer > 0 (bytes)")
    return int(value), MAX_LEAF_BYTES


def start_orbax_save(path: Path, tree: Tree, metadata: Mapping[str, Any]) -> OrbaxSave:
    """Start a save of Orbax, without a copy, and without compression, which hardly helps."""
    _filter_logs()
    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False
    context.array.saving.use_compression = False
    # Otherwise Orbax waits for a directory that cannot be created until it times out.
    context.asynchronous.create_directories_asynchronously = False
    with context:
        path = _without_wildcards(path.parent) / path.name
        return ocp.save_async(str(path), tree, custom_metadata={**metadata})


@functools.cache
def _without_wildcards(directory: Path) -> Path:
    """Return a path without wildcards, which Orbax would expand: a link if needed."""
    if not any(character in str(directory) for character in "*?[\\"):
        return directory
    link = Path(tempfile.mkdtemp(prefix="ftrain-"), "link")
    link.symlink_to(directory)
    atexit.register(shutil.rmtree, link.parent, ignore_errors=True)
    return link


def is_checkpoint(directory: Path) -> bool:
    """Return True for a checkpoint, complete or not, damaged or not."""
    return has_orbax_files(directory) or any(exists(path) for path in _inner_metadata(directory))


def has_orbax_files(directory: Path) -> bool:
    """Return True if a directory itself has a file that Orbax writes at the top of a checkpoint."""
    return any(exists(directory / name) for name in (_METADATA, "_CHECKPOINT_METADATA", COMMITTED))


def leaf_specs(directory: Path, *, max_bytes: int = _MAX_METADATA) -> Specs:
    """Return the tensorstore spec of each leaf by name; metadata have at most `max_bytes`."""
    home = _tree_directory(directory)
    try:
        metadata = json.loads(read_whole(home / _METADATA, max_bytes))
        driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        is_database = bool(metadata.get("use_ocdbt", True))
        # Old versions of Orbax stored no chunks of zeros, so there a missing chunk is no damage.
        is_complete = bool(metadata.get("store_array_data_equal_to_fill_value", False))
        entries: Mapping[str, Any] = metadata["tree_metadata"]
        keys = [
            [str(part["key"]) for part in entry["key_metadata"]]
            for entry in entries.values()
            if entry["value_metadata"]["value_type"] not in _EMPTY
        ]
        options = {"driver": driver, "fill_missing_data_reads": not is_complete}
        return {
            "/".join(key): options | _location(home, ".".join(key), is_database) for key in keys
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise_if_transient(error, home / _METADATA)
        raise DamagedError(
            directory, [f"file {home.name}/{_METADATA}: {summarize_error(error)}"]
        ) from error


def open_leaves(directory: Path, specs: Specs, names: Iterable[str]) -> dict[str, StoredLeaf]:
    """Open leaves for reading; no values are read yet."""
    context = ts.Context(_NO_CACHE)  # a new one: the default remembers older files of the same path
    opening: dict[str, Any] = {}
    opened: dict[str, StoredLeaf] = {}
    for name, spec in ((name, specs[name]) for name in names):
        try:
            opening[name] = ts.open(spec, open=True, read=True, context=context)
        except (ValueError, RuntimeError) as error:  # such as an invalid name
            raise_if_transient(error, directory)
            raise DamagedError(
                directory, [f"leaf {name!r} cannot be read: {summarize_error(error)}"]
            ) from error
    for name, future in opening.items():
        try:
            array = future.result()
        except ValueError as error:
            raise_if_transient(error, directory)
            raise DamagedError(
                directory, [f"leaf {name} cannot be read: {summarize_error(error)}"]
            ) from error
        opened[name] = StoredLeaf(tuple(array.shape), array.dtype.numpy_dtype, array)
    return opened


def _tree_directory(directory: Path) -> Path:
    """Return the directory that holds the tree: one inside the checkpoint, or itself."""
    if not is_directory(directory):
        raise CheckpointError(f"{directory} is not a checkpoint: there is no such directory")
    candidates = [directory / _METADATA, *_inner_metadata(directory)]
    homes = [path.parent for path in candidates if exists(path)]
    if not homes:
        raise DamagedError(directory, [f"file {_METADATA} is missing"])
    if len(homes) > 1:
        names = ", ".join(home.name for home in homes)
        raise CheckpointError(
            f"{directory} holds several trees: {names}; choose one of them, such as {homes[0]}"
        )
    return homes[0]


def _inner_metadata(directory: Path) -> list[Path]:
    """Return the metadata of trees inside a checkpoint; a number names another checkpoint."""
    paths = [directory / name / _METADATA for name in list_names(directory) if not name.isdecimal()]
    return [path for path in paths if exists(path)]


def _location(home: Path, key: str, is_database: bool) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{home}/"}
    if is_database:
        return {"kvstore": {"driver": "ocdbt", "base": base, "path": f"{key}/"}}
    if "/" in key or key.startswith(".."):
        raise ValueError(f"leaf {key} is not inside the checkpoint")
    return {"kvstore": {"driver": "file", "path": f"{home}/{key}/"}}


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    """Return False for log records of errors that Orbax also raises: one report is enough."""
    if "_SignalingThread.run() raised" in record.getMessage():
        return False
    if record.name != "asyncio" or not record.exc_info:
        return True
    # asyncio logs the errors of tasks and futures that are not awaited. Those of TensorStore's
    # futures have no trace.
    _, error, trace = record.exc_info
    if trace is None and isinstance(error, ValueError) and "OCDBT database" in str(error):
        return False
    return not any(
        "orbax" in Path(frame.f_code.co_filename).parts for frame, _ in traceback.walk_tb(trace)
    )


@functools.cache
def _filter_logs() -> None:
    """Filter the logs of Orbax, for good: some of its threads end after the error was raised."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_not_from_orbax)
