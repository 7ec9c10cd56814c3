"""Restore: the leaves of a checkpoint into a tree, read ahead, and verified while they are read."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ftrain.checkpoints.errors import CheckpointError, DamagedError, summarize_error
from ftrain.checkpoints.manifest import (
    Leaf,
    Manifest,
    find_wrong_checksums,
    find_wrong_files,
    format_index,
    has_saved_values,
    read_manifest,
)
from ftrain.checkpoints.matching import Selection, cast, describe_leaf, match
from ftrain.checkpoints.orbax_layout import StoredLeaf, leaf_specs, open_leaves
from ftrain.checkpoints.snapshot import Index, as_array, digest_of, is_key
from ftrain.packed import pack_like, unpack
from ftrain.storage import raise_if_transient
from ftrain.tree import Tree, named_leaves

LARGE = 1 << 20  # bytes; a file of this size or more is verified through the values in it
_READ_AHEAD = 1 << 28  # bytes read while the values before them are verified and used
_MAX_CHECKS = 3  # large leaves that wait for verification, and so stay in memory
_ALL = Selection()

Target = np.ndarray | jax.ShapeDtypeStruct  # a leaf to restore, without its value


def restore_tree(
    directory: Path, like: Tree, selection: Selection = _ALL, *, verify: bool = True
) -> Tree:
    """Return the tree of a checkpoint.

    `like` gives structure, shapes, dtypes and shardings, and the values of leaves not selected.
    """
    target_tree = _as_targets(like)
    targets = named_leaves(target_tree)
    if len(targets) < len(jax.tree.leaves(target_tree)):
        raise CheckpointError(
            "the tree to restore into has several leaves of one name, because of a '/' in a key"
        )
    manifest, sources = _find_leaves(directory, targets, selection)
    values = _read_leaves(directory, manifest, sources, targets, verify)
    for name in values.keys() & _plain_number_names(like):
        values[name] = values[name].item()
    if len(values) < len(targets):
        values |= _initial_values(like, set(targets) - set(values))
    leaves = [values[name] for name in targets]
    return pack_like(jax.tree.unflatten(jax.tree.structure(target_tree), leaves), like)


def check_leaves(directory: Path, like: Tree) -> None:
    """Raise an error if the leaves of a checkpoint are not those of `like`; no values are read."""
    _find_leaves(directory, named_leaves(_as_targets(like)), _ALL, hint=False)


def _find_leaves(
    directory: Path, targets: dict[str, Target], selection: Selection, *, hint: bool = True
) -> tuple[Manifest | None, dict[str, str]]:
    """Return the manifest, and the name in the checkpoint of each selected leaf."""
    manifest = read_manifest(directory)
    if manifest is not None and (wrong := find_wrong_files(directory, manifest)):
        raise DamagedError(directory, wrong)
    found: Mapping[str, Leaf | StoredLeaf]
    if manifest is not None:
        found = manifest.leaves
    else:
        specs = leaf_specs(directory)
        found = open_leaves(directory, specs, specs)
    expected = {name: _as_stored(target) for name, target in targets.items()}
    return manifest, match(directory, found, expected, selection, hint=hint)


def _read_leaves(
    directory: Path,
    manifest: Manifest | None,
    sources: dict[str, str],
    targets: dict[str, Target],
    verify: bool,
) -> dict[str, Any]:
    """Return the values of the selected leaves by their names in the tree."""
    by_source = {source: targets[name] for name, source in sources.items()}
    with _LeafReader(directory, manifest, by_source, verify=verify) as reader:
        sharded = {
            source: target
            for source in reader.stored
            if isinstance(target := by_source[source], jax.ShapeDtypeStruct)
            and _is_multihost(target)
        }
        whole = [source for source in reader.stored if source not in sharded]
        values = reader.read_whole(
            whole, lambda source, value: _place(value, by_source[source], source)
        )
        for source, target in sharded.items():
            values[source] = reader.read_shards(source, target.sharding, target.dtype)
    return {
        name: values[source] if source in values else _empty_leaf(targets[name])
        for name, source in sources.items()
    }


class _LeafReader:
    """Reads leaves of one checkpoint; at the end, one error lists everything that is wrong.

    One thread uses the leaves while tensorstore's threads read the next ones. More Python threads
    would only take turns. Values are verified by the digests of leaves. So large files, which hold
    nothing but values, are not read again for their checksums, except to find out which is damaged.
    """

    def __init__(
        self, directory: Path, manifest: Manifest | None, names: Iterable[str], *, verify: bool
    ):
        self._directory = directory
        self._manifest = manifest
        self._verify = verify and manifest is not None
        self._leaves: Mapping[str, Leaf] = manifest.leaves if manifest else {}
        self._wrong: list[str] = []
        self._checker = ThreadPoolExecutor(1)
        self._checks: deque[Future[None]] = deque()
        specs = leaf_specs(directory)
        self.stored = open_leaves(directory, specs, [name for name in names if name in specs])

    def read_whole(
        self, names: Iterable[str], use: Callable[[str, np.ndarray], Any]
    ) -> dict[str, Any]:
        """Return `use(name, value)` for each leaf that can be read."""
        used: dict[str, Any] = {}
        for name, read in self._read_ahead(
            [name for name in names if self._has_expected_type(name)]
        ):
            try:
                value = read()
            except ValueError as error:
                raise_if_transient(error, self._directory)
                self._wrong.append(f"leaf {name} cannot be read: {summarize_error(error)}")
                continue
            if self._verify:
                self._check_value(name, value)
            used[name] = use(name, value)
        return used

    def read_shards(
        self, name: str, sharding: jax.sharding.Sharding, dtype: np.dtype
    ) -> jax.Array | None:
        """Return a leaf that is spread over processes.

        Each process reads its own shards, and verifies those that were saved as they are.
        """
        if not self._has_expected_type(name):
            return None
        stored = self.stored[name]
        digests = self._leaves[name].pieces if self._verify else {}

        def read(index: Index | None) -> np.ndarray:
            try:
                value = stored.read(index or ())
            except ValueError as error:
                raise_if_transient(error, self._directory)
                raise DamagedError(
                    self._directory, [f"leaf {name} cannot be read: {summarize_error(error)}"]
                ) from error
            expected = digests.get(format_index(index or (), stored.shape))
            if expected is not None and digest_of(value) != expected:
                self._wrong.append(f"leaf {name} has other values than were saved")
            return cast(value, dtype, name)

        return jax.make_array_from_callback(stored.shape, sharding, read)

    def __enter__(self) -> "_LeafReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._checker.shutdown()
        if kind is None:
            for check in self._checks:
                check.result()
            self._raise_if_damaged()

    def _raise_if_damaged(self) -> None:
        wrong: list[str] = []
        if self._verify and self._manifest:
            # Each process reads only its shards, but all must come to the same conclusion.
            every_file = bool(self._wrong) or jax.process_count() > 1
            sizes = None if every_file else range(LARGE)
            wrong = find_wrong_checksums(self._directory, self._manifest, sizes)
        if wrong or self._wrong:
            raise DamagedError(self._directory, wrong + self._wrong)

    def _check_value(self, name: str, value: np.ndarray) -> None:
        """Verify the values of a leaf, of a large one in the background."""

        def check() -> None:
            if not has_saved_values(value, self._leaves[name]):
                self._wrong.append(f"leaf {name} has other values than were saved")

        if value.nbytes < LARGE:
            check()
            return
        while len(self._checks) > _MAX_CHECKS:
            self._checks.popleft().result()
        self._checks.append(self._checker.submit(check))

    def _has_expected_type(self, name: str) -> bool:
        found = describe_leaf(self.stored[name])
        expected = describe_leaf(self._leaves.get(name, self.stored[name]))
        if found != expected:
            self._wrong.append(f"leaf {name} is {found}, expected {expected}")
        return found == expected

    def _read_ahead(self, names: Iterable[str]) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        """Start to read leaves, and yield for each a function that waits for its values."""
        pending: deque[tuple[str, Any, int]] = deque()
        total = 0
        for name in names:
            stored = self.stored[name]
            try:
                future = stored.start_reading()
            except ValueError as error:
                self._wrong.append(f"leaf {name} cannot be read: {summarize_error(error)}")
                continue
            pending.append((name, future, stored.bytes))
            total += stored.bytes
            while total > _READ_AHEAD and len(pending) > 1:
                first, future, size = pending.popleft()
                total -= size
                yield first, future.result
        for name, future, _ in pending:
            yield name, future.result


class _StoredKey(NamedTuple):
    """A random key as it is stored: the shape and dtype of its data, and its implementation."""

    shape: tuple[int, ...]
    dtype: Any
    key: str


def _as_targets(like: Tree) -> Tree:
    return unpack(jax.tree.map(_as_target, like))


def _as_target(leaf: Any) -> Target:
    """Return a leaf without its value; numpy arrays stay numpy, which keeps 64-bit dtypes."""
    array = as_array(leaf)
    if isinstance(array, np.ndarray):
        return np.empty(array.shape, array.dtype.newbyteorder("="))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _as_stored(target: Target) -> "Target | _StoredKey":
    """Return the shape and dtype of a leaf on disk, where a random key is its data."""
    if isinstance(target, np.ndarray) or not is_key(target):
        return target
    data = jax.eval_shape(jax.random.key_data, target)
    return _StoredKey(data.shape, data.dtype, str(_key_implementation(target)))


def _key_implementation(key: jax.ShapeDtypeStruct) -> Any:
    return jax.random.key_impl(jax.numpy.empty((), key.dtype))


def _is_multihost(target: jax.ShapeDtypeStruct) -> bool:
    """Return True if each process reads a part of a leaf."""
    sharding = target.sharding
    return sharding is not None and not (
        sharding.is_fully_addressable or sharding.is_fully_replicated or is_key(target)
    )


def _place(value: np.ndarray, target: Target, name: str) -> np.ndarray | jax.Array:
    """Return a value with the type, dtype and sharding of its target."""
    if isinstance(target, np.ndarray):
        return cast(value, target.dtype, name)
    if is_key(target):
        data = put(value, target.sharding)
        return jax.random.wrap_key_data(data, impl=_key_implementation(target))
    return put(cast(value, target.dtype, name), target.sharding)


def put(value: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Put a value, which every process has, on the devices of a sharding."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _empty_leaf(target: Target) -> np.ndarray | jax.Array:
    """Return a leaf without elements, of which nothing is stored."""
    stored = _as_stored(target)
    return _place(np.empty(stored.shape, stored.dtype), target, "")


def _plain_number_names(like: Tree) -> set[str]:
    return {
        name
        for name, leaf in named_leaves(like).items()
        if isinstance(leaf, (bool, int, float, complex))
    }


def _initial_values(like: Tree, names: set[str]) -> dict[str, Any]:
    """Return the values that `like` has for leaves that are not restored."""
    leaves = named_leaves(unpack(like))
    for name in sorted(names):
        if isinstance(leaves[name], jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"leaf {name} is not restored, and `like` has no value for it to keep; "
                "restore it, or pass an array in `like`"
            )
    return {name: leaves[name] for name in names}
