"""Restoring: the leaves of a checkpoint into a tree, verified while they are read."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ftrain.checkpoints.casting import cast
from ftrain.checkpoints.errors import CheckpointError, DamagedError
from ftrain.checkpoints.layout import Stored, leaf_specs, open_leaves
from ftrain.checkpoints.manifest import Manifest, read_manifest
from ftrain.checkpoints.matching import Selection, match
from ftrain.checkpoints.reading import Reading
from ftrain.checkpoints.snapshot import as_array, is_key
from ftrain.checkpoints.verifying import wrong_files
from ftrain.packed import pack_like, unpack
from ftrain.tree import Tree, named_leaves

ALL = Selection()


class _Key(NamedTuple):
    """A random key as it is stored."""

    shape: tuple[int, ...]
    dtype: Any
    key: str


def load(directory: Path, like: Tree, selection: Selection = ALL, *, verify: bool = True) -> Tree:
    """The tree of a checkpoint; `like` gives structure, shapes, dtypes and shardings, and what is not taken."""
    targets = _targets(like)
    wanted = named_leaves(targets)
    if len(wanted) < len(jax.tree.leaves(targets)):
        raise CheckpointError(
            "the tree to restore into has several leaves of one name, because of a '/' in a key"
        )
    manifest, sources = _find_leaves(directory, wanted, selection)
    values = _read(directory, manifest, sources, wanted, verify)
    values |= {name: values[name].item() for name in values.keys() & _plain_numbers(like)}
    if len(values) < len(wanted):
        values = _kept(like, set(wanted) - set(values)) | values
    return pack_like(
        jax.tree.unflatten(jax.tree.structure(targets), [values[name] for name in wanted]), like
    )


def _find_leaves(
    directory: Path, wanted: dict[str, Any], selection: Selection, *, hint: bool = True
) -> tuple[Manifest | None, dict[str, str]]:
    """The manifest, and where each leaf that is taken comes from; nothing but names, sizes and shapes is looked at."""
    manifest = read_manifest(directory)
    if manifest is not None and (wrong := wrong_files(directory, manifest)):
        raise DamagedError(directory, wrong)
    found = manifest.leaves if manifest else _undescribed(directory)
    stored = {name: _as_stored(leaf) for name, leaf in wanted.items()}
    return manifest, match(directory, found, stored, selection, hint=hint)


def check_leaves(directory: Path, like: Tree) -> None:
    """An error if the leaves of a checkpoint are not those of `like`; none of their values is read."""
    _find_leaves(directory, named_leaves(_targets(like)), ALL, hint=False)


def _undescribed(directory: Path) -> dict[str, Stored]:
    specs = leaf_specs(directory)
    return open_leaves(directory, specs, specs)


def _read(
    directory: Path,
    manifest: Manifest | None,
    sources: dict[str, str],
    wanted: dict[str, Any],
    verify: bool,
):
    """The values of the leaves that are taken, by their names in the tree."""
    targets = {source: wanted[name] for name, source in sources.items()}
    with Reading(directory, manifest, targets, verify=verify) as reading:
        spread = [source for source in reading.stored if _is_spread_over_processes(targets[source])]
        whole = [source for source in reading.stored if source not in spread]
        values = reading.whole(whole, lambda source, value: _place(value, targets[source], source))
        values |= {
            source: reading.pieces(source, targets[source].sharding, targets[source].dtype)
            for source in spread
        }
    return {
        name: values[source] if source in values else _empty(wanted[name])
        for name, source in sources.items()
    }


def _empty(target: Any) -> Any:
    """A leaf without elements, of which nothing is stored."""
    stored = _as_stored(target)
    return _place(np.empty(stored.shape, stored.dtype), target, "")


def _place(value: np.ndarray, target: Any, name: str) -> Any:
    """A value where it is wanted, and as what."""
    if isinstance(target, np.ndarray):
        return cast(value, target.dtype, name)
    if is_key(target):
        return jax.random.wrap_key_data(_put(value, target.sharding), impl=_kind(target))
    return _put(cast(value, target.dtype, name), target.sharding)


def _put(value: np.ndarray, sharding: Any) -> jax.Array:
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index]
    )  # each process its part


def _kind(key: jax.ShapeDtypeStruct) -> Any:
    return jax.random.key_impl(jax.numpy.empty((), key.dtype))


def _targets(like: Tree) -> Tree:
    return unpack(jax.tree.map(_target, like))


def _plain_numbers(like: Tree) -> set[str]:
    return {
        name
        for name, leaf in named_leaves(like).items()
        if isinstance(leaf, (bool, int, float, complex))
    }


def _target(leaf: Any) -> Any:
    """What is known of a leaf without its value: numpy arrays stay numpy, which keeps their 64 bits."""
    array = as_array(leaf)
    if isinstance(array, np.ndarray):
        return np.empty(array.shape, array.dtype.newbyteorder("="))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _as_stored(target: Any) -> Any:
    """The shape and dtype of a leaf on disk: keys are stored as the numbers that they are made of."""
    if not is_key(target):
        return target
    numbers = jax.eval_shape(jax.random.key_data, target)
    return _Key(numbers.shape, numbers.dtype, str(_kind(target)))


def _is_spread_over_processes(target: Any) -> bool:
    sharding = getattr(target, "sharding", None)
    return sharding is not None and not (
        sharding.is_fully_addressable or sharding.is_fully_replicated or is_key(target)
    )


def _kept(like: Tree, names: set[str]) -> dict[str, Any]:
    """The leaves that are not taken, as they are."""
    leaves = named_leaves(unpack(like))
    for name in sorted(names):
        if isinstance(leaves[name], jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"leaf {name} is not taken from the checkpoint, and has no value that could be kept"
            )
    return {name: leaves[name] for name in names}
