"""Snapshots: the values of a tree at one moment, for a thread that writes them; their digests."""

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import ml_dtypes
import numpy as np
import xxhash

from ftrain.checkpoints.errors import CheckpointError
from ftrain.packed import unpack
from ftrain.tree import Tree, leaves_with_names

Index = tuple[slice, ...]
_THREADS = 2  # digests release the GIL, and are bound by memory more than by arithmetic

T = TypeVar("T")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class LeafSnapshot:
    """The values of a leaf that this process has, in pieces, one for each shard."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: list[tuple[Index, np.ndarray]]
    is_whole: bool = True  # False if other processes have more pieces
    key: str | None = None  # the implementation of a random key; the values are its data

    def value(self) -> np.ndarray:
        """Return the whole leaf."""
        if len(self.pieces) == 1:
            return self.pieces[0][1]
        value = np.empty(self.shape, self.dtype)
        for index, piece in self.pieces:
            value[index] = piece
        return value


def take_snapshot(tree: Tree) -> Tree:
    """Return `tree`, unpacked, with a `LeafSnapshot` for every leaf.

    jax arrays in the host's memory are not copied: while numpy holds a view of one, jax does not
    overwrite it, even if it was donated to a step; that step writes elsewhere. So a snapshot costs
    a few microseconds a leaf.
    """
    _check(tree)
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()  # start all transfers before waiting for the first
    return jax.tree.map(_as_snapshot, unpack(jax.tree.map(_to_host, tree)))


def digest_leaves(tree: Tree) -> dict[str, str]:
    """Return a digest of every leaf's values, by name.

    Of a leaf that is spread over several processes, it covers what this process has.
    """

    def digest(leaf: LeafSnapshot) -> str:
        if leaf.is_whole:
            return digest_of(leaf.value())
        return ",".join(digest_of(piece) for _, piece in leaf.pieces)

    return {name: digest(leaf) for name, leaf in leaves_with_names(take_snapshot(tree))}


def digest_of(array: np.ndarray) -> str:
    """Return a 128-bit digest of an array's values, in the order of its elements."""
    data = _as_bytes(array)
    return xxhash.xxh3_128_hexdigest(data)  # pyright: ignore[reportArgumentType] - a buffer


def is_finite(array: np.ndarray) -> bool:
    """Return True if no element is infinite or NaN; integers always are finite."""
    if array.dtype in (np.float16, ml_dtypes.bfloat16):
        # numpy is slow at these types, so look at the bits of the exponents.
        exponent = np.uint16(0x7C00 if array.dtype == np.float16 else 0x7F80)
        return not bool(((_as_bytes(array).view(np.uint16) & exponent) == exponent).any())
    try:
        return bool(np.isfinite(array).all())
    except TypeError:  # int4 and similar types
        return True


def in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Map `function` over the items with a few threads; results are in order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


def as_orbax_leaf(leaf: LeafSnapshot) -> Any:
    """Return a leaf as Orbax saves it; None for one without elements, which Orbax refuses."""
    if 0 in leaf.shape:
        return None
    if leaf.key is None:
        return leaf.value()
    return jax.random.wrap_key_data(jax.numpy.asarray(leaf.value()), impl=leaf.key)


def as_orbax_tree(tree: Tree) -> Tree:
    """Return the arrays of a tree themselves, as Orbax saves them from several processes."""
    return jax.tree.map(lambda leaf: as_array(leaf) if np.size(leaf) else None, unpack(tree))


def is_key(leaf: Any) -> bool:
    """Return True for random keys."""
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_array(leaf: Any) -> Any:
    """Return a leaf that may be a plain number as an array, without loss of precision."""
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
        return leaf
    return np.asarray(leaf)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the memory of an array, without a copy if its elements are contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _to_host(leaf: Any) -> Any:
    """Return an array as numpy sees it, in pieces if it is sharded."""
    if not isinstance(leaf, jax.Array):
        array = as_array(leaf)
        return array.astype(array.dtype.newbyteorder("="))  # a copy: the caller may write to it
    if is_key(leaf):
        data = _as_snapshot(_to_host(jax.random.key_data(leaf)))
        return dataclasses.replace(data, key=str(jax.random.key_impl(leaf)))
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    own = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    pieces = [(shard.index, np.asarray(shard.data)) for shard in own]
    return LeafSnapshot(leaf.shape, leaf.dtype, pieces, is_whole=leaf.is_fully_addressable)


def _as_snapshot(leaf: Any) -> LeafSnapshot:
    if isinstance(leaf, LeafSnapshot):
        return leaf
    index = tuple(slice(0, size) for size in leaf.shape)
    return LeafSnapshot(leaf.shape, leaf.dtype, [(index, leaf)])


def _check(tree: Tree) -> None:
    """Raise a CheckpointError that names the first leaf that cannot be saved."""
    leaves = leaves_with_names(tree)
    if not leaves:
        raise CheckpointError("there is nothing to save: the tree has no leaves")
    for name, leaf in leaves:
        _check_value(name, leaf)
    for name, _ in leaves:
        if name and "" in name.split("/"):
            raise CheckpointError(
                f"leaf {name!r} has an empty part in its name, which cannot be stored; rename a key"
            )
    on_disk: dict[str, str] = {}  # Orbax joins keys by dots
    for name, _ in leaves:
        other = on_disk.setdefault(name.replace("/", "."), name)
        if other is not name:
            raise CheckpointError(
                f"leaves {other} and {name} have the same name on disk, "
                "because of a '/' or '.' in a key; rename a key"
            )


def _check_value(name: str, leaf: Any) -> None:
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        raise CheckpointError(
            f"leaf {name} is a {type(leaf).__name__}; only arrays and numbers can be saved"
        )
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "OSUMm":
        raise CheckpointError(
            f"leaf {name} is an array of {leaf.dtype}; only arrays of numbers can be saved"
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise CheckpointError(
            f"leaf {name} was deleted: it was donated to a step; save what the step returned"
        )
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        raise CheckpointError(
            f"leaf {name} is {leaf}, which needs more than 64 bits; save it as an array"
        )
