"""Packed trees: many small leaves in one vector for each dtype, because each array costs time.

Every array argument makes a call of a compiled function slower. A packed tree holds the leaves of a
tree in few arrays. `unpack` and `pack_like` convert between the two, so that a checkpoint names
every leaf, packed or not.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ftrain.tree import Tree

MAX_PACKED_SIZE = 4096  # elements of a leaf; copying more costs more than a leaf of its own
MIN_PACKED_LEAVES = 8  # packing fewer is not worth it
_JOINED_AT_ONCE = 50  # leaves; XLA is very slow to compile a concatenation of a thousand


@dataclasses.dataclass(frozen=True)
class Place:
    """The part of a group's vector that holds a leaf."""

    group: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the leaves of a tree are packed. A leaf without a place is kept apart, as it is.

    All leaves of a group may be None, and any leaf that is kept apart. The arrays for them are
    None too.
    """

    structure: Any  # the tree structure
    places: tuple[Place | None, ...]

    def join(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the arrays for these leaves: first those apart, then a vector for each group."""
        return self.apart(leaves) + [
            join([leaves[n] for n in self.members(group)]) for group in self.groups()
        ]

    def split(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the leaves of these arrays; a leading axis of all of them is kept."""
        vectors = arrays[len(arrays) - len(self.groups()) :]
        if any(isinstance(vector, Tracer) for vector in vectors):
            # Otherwise XLA would recompute a part of the vector for each leaf.
            vectors = jax.lax.optimization_barrier(vectors)
        vector_of = dict(zip(self.groups(), vectors, strict=True))
        apart = iter(arrays)
        return [
            next(apart) if place is None else _take(vector_of[place.group], place)
            for place in self.places
        ]

    def store(self, arrays: Sequence[jax.Array | None]) -> Tree:
        """Return the packed tree of these arrays; an ordinary one if no leaf is packed."""
        return Packed(list(arrays), self) if self.groups() else self.structure.unflatten(arrays)

    def arrays(self, stored: Tree) -> list[Any]:
        """Return the arrays of a tree that was stored in this layout."""
        return stored.arrays if isinstance(stored, Packed) else self.structure.flatten_up_to(stored)

    def apart(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves that are kept apart."""
        return [leaf for leaf, place in zip(leaves, self.places, strict=True) if place is None]

    def groups(self) -> list[str]:
        """Return the names of the groups, in order."""
        return sorted({place.group for place in self.places if place is not None})

    def members(self, group: str) -> list[int]:
        """Return the positions of a group's leaves in the tree, in the order of their places."""
        return [
            n for n, place in enumerate(self.places) if place is not None and place.group == group
        ]

    def length(self, group: str) -> int:
        """Return the length of a group's vector."""
        return sum(
            place.size for place in self.places if place is not None and place.group == group
        )


def join(leaves: Sequence[Any]) -> Any:
    """Join leaves to one vector; many of them in two rounds, because XLA compiles that faster."""
    if leaves[0] is None:
        return None
    flat = [jax.lax.reshape(jnp.asarray(leaf), (jnp.size(leaf),)) for leaf in leaves]
    if len(flat) > _JOINED_AT_ONCE:
        parts = [
            jax.lax.concatenate(flat[n : n + _JOINED_AT_ONCE], 0)
            for n in range(0, len(flat), _JOINED_AT_ONCE)
        ]
        flat = jax.lax.optimization_barrier(parts)
    return jax.lax.concatenate(flat, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree whose small leaves are stored in one vector for each dtype."""

    arrays: list[Any]  # arrays; None for leaves that are None
    layout: Layout = dataclasses.field(metadata={"static": True})

    def leaves(self) -> list[jax.Array]:
        """Return the leaves of the tree."""
        return self.layout.split(self.arrays)

    def tree(self) -> Tree:
        """Return the tree, unpacked."""
        return self.layout.structure.unflatten(self.leaves())


def plan(tree: Tree, packed: bool | None = None) -> Layout:
    """Plan how to pack a tree.

    By default, small leaves of one dtype are packed if there are enough of them; `packed` decides
    for all leaves. Leaves that are sharded over devices keep their sharding and are never packed.
    """
    leaves, structure = jax.tree.flatten(tree)
    if packed not in (None, True, False):
        raise ValueError(f"packed must be True, False or None, got {packed!r:.60}")
    limit = {None: MAX_PACKED_SIZE, True: math.inf, False: -1}[packed]
    first = next(filter(is_concrete, leaves), None)
    fits = [jnp.size(leaf) <= limit and _is_whole(leaf, first) for leaf in leaves]
    counts = Counter(
        jnp.result_type(leaf).name for leaf, is_fit in zip(leaves, fits, strict=True) if is_fit
    )
    ends: Counter[str] = Counter()
    places: list[Place | None] = []
    for leaf, is_fit in zip(leaves, fits, strict=True):
        group = jnp.result_type(leaf).name
        if not is_fit or (packed is None and counts[group] < MIN_PACKED_LEAVES):
            places.append(None)
            continue
        places.append(Place(group, ends[group], jnp.shape(leaf)))
        ends[group] += jnp.size(leaf)
    return Layout(structure, tuple(places))


def unpack(tree: Tree) -> Tree:
    """Replace every packed tree in `tree` by an ordinary one."""
    return jax.tree.map(
        lambda node: node.tree() if is_packed(node) else node, tree, is_leaf=is_packed
    )


def pack_like(tree: Tree, like: Tree) -> Tree:
    """Pack `tree`, which has the structure of `unpack(like)`, as `like` is packed."""

    def pack(node: Packed, unpacked: Tree) -> Packed:
        return Packed(node.layout.join(node.layout.structure.flatten_up_to(unpacked)), node.layout)

    structure = jax.tree.structure(like, is_leaf=is_packed)
    nodes = zip(
        jax.tree.leaves(like, is_leaf=is_packed), structure.flatten_up_to(tree), strict=True
    )
    return structure.unflatten(
        [pack(node, part) if is_packed(node) else part for node, part in nodes]
    )


def is_packed(node: object) -> TypeGuard[Packed]:
    """True for a packed tree; pass it as `is_leaf` to keep them whole."""
    return isinstance(node, Packed)


_SINGLE = jax.lax.GatherDimensionNumbers(
    offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,)
)


def is_concrete(leaf: object) -> TypeGuard[jax.Array]:
    """True for an array with values, not a tracer or a shape."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _take(vector: Any, place: Place) -> Any:
    """Return a leaf from its group's vector; for the shape of a vector, the shape of the leaf."""
    if vector is None:
        return None
    shape = (*vector.shape[:-1], *place.shape)
    if isinstance(vector, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, vector.dtype, sharding=vector.sharding)
    if isinstance(vector, Tracer) and vector.ndim == 1 and jax.default_backend() == "cpu":
        # XLA compiles a slice for every offset, but a gather only once for each shape.
        indices = np.arange(place.start, place.start + place.size, dtype=np.int32).reshape(
            *place.shape, 1
        )
        return jax.lax.gather(
            vector, indices, _SINGLE, (1,), mode="promise_in_bounds", unique_indices=True
        )
    return vector[..., place.start : place.start + place.size].reshape(shape)


def _is_whole(leaf: object, first: jax.Array | None) -> bool:
    """True for a leaf that is not sharded and has the devices of the first concrete leaf."""
    if first is None or not is_concrete(leaf):
        return True
    return (
        leaf.sharding.is_fully_replicated and leaf.sharding.device_set == first.sharding.device_set
    )
