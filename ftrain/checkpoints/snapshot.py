"""Snapshots: the values of a tree at one moment, held for a thread that writes them while training goes on."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import numpy as np

from ftrain.checkpoints.digests import digest_of
from ftrain.checkpoints.errors import CheckpointError
from ftrain.packed import unpack
from ftrain.tree import Tree, leaves_with_names

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Held:
    """The values of a leaf that this process has, in pieces, as they lie on its devices."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: list[tuple[Index, np.ndarray]]
    is_whole: bool = True  # whether the pieces of this process are all that there are
    key: str | None = (
        None  # the kind of a random key; its values are the numbers that it is made of
    )

    def value(self) -> np.ndarray:
        """The whole leaf."""
        if len(self.pieces) == 1:
            return self.pieces[0][1]
        value = np.empty(self.shape, self.dtype)
        for index, piece in self.pieces:
            value[index] = piece
        return value


def take(tree: Tree) -> Tree:
    """`tree` as it is now, unpacked, with a `Held` for every leaf; what is in the host's memory is not copied.

    A device array that is looked at from outside is not written over, even by a step that was told that it may
    (donation): that step then writes elsewhere. So a snapshot costs a few microseconds for each leaf.
    """
    _check(tree)
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()  # all transfers are under way before the first is waited for
    return jax.tree.map(_hold, unpack(jax.tree.map(_look_at, tree)))


def digest_leaves(tree: Tree) -> dict[str, str]:
    """A digest of every leaf's value, by name; of what this process has of it, where it is spread over several."""

    def digest(held: Held) -> str:
        return ",".join(
            digest_of(piece)
            for _, piece in (held.pieces if not held.is_whole else [((), held.value())])
        )

    return {name: digest(held) for name, held in leaves_with_names(take(tree))}


def as_saved(held: Held) -> Any:
    """A leaf as Orbax is given it; one without elements is not, because Orbax does not take it."""
    if 0 in held.shape:
        return None
    return (
        held.value()
        if held.key is None
        else jax.random.wrap_key_data(jax.numpy.asarray(held.value()), impl=held.key)
    )


def as_given(tree: Tree) -> Tree:
    """The arrays of a tree themselves, as Orbax is given them where several processes save together."""
    return jax.tree.map(lambda leaf: as_array(leaf) if np.size(leaf) else None, unpack(tree))


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_array(leaf: Any) -> Any:
    """A leaf that may be a plain number as an array, with all its bits."""
    return (
        leaf
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))
        else np.asarray(leaf)
    )


def _look_at(leaf: Any) -> Any:
    """An array as numpy sees it; in parts, where it is spread over devices."""
    if not isinstance(leaf, jax.Array):
        array = as_array(
            leaf
        )  # of which a copy is held: the caller may write to the one that was given
        return array.astype(array.dtype.newbyteorder("="))
    if is_key(leaf):
        return dataclasses.replace(
            _hold(_look_at(jax.random.key_data(leaf))), key=str(jax.random.key_impl(leaf))
        )
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    own = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    pieces = [(shard.index, np.asarray(shard.data)) for shard in own]
    return Held(leaf.shape, leaf.dtype, pieces, is_whole=leaf.is_fully_addressable)


def _hold(leaf: Any) -> Held:
    if isinstance(leaf, Held):
        return leaf
    return Held(leaf.shape, leaf.dtype, [(tuple(slice(0, size) for size in leaf.shape), leaf)])


def _check(tree: Tree) -> None:
    """What cannot be saved is named."""
    leaves = leaves_with_names(tree)
    if not leaves:
        raise CheckpointError("there is nothing to save: the tree has no leaves")
    for name, leaf in leaves:
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
                f"leaf {name} is gone: it was donated to a step; save what the step returned"
            )
        if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
            raise CheckpointError(
                f"leaf {name} is {leaf}, which needs more than 64 bits; save it as an array"
            )
    for name, _ in leaves:
        if name and "" in name.split("/"):
            raise CheckpointError(
                f"leaf {name!r} has an empty part in its name, which cannot be stored; rename a key"
            )
    stored = Counter(
        name.replace("/", ".") for name, _ in leaves
    )  # Orbax joins the keys of a leaf by dots
    for name, _ in leaves:
        if stored[name.replace("/", ".")] > 1:
            raise CheckpointError(
                f"leaf {name} has the same name on disk as another, because of a '/' or '.' in a key"
            )
