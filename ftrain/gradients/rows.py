"""Rows: row-sparse gradients of tables, at a cost that does not depend on the table's size."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from ftrain.tree import Tree, widen

_BUCKETS_PER_ID = 8  # with these, two or three rounds of hashing place nearly every list


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A table that is zero except for some rows: `values[i]` is added to row `indices[i]`.

    An index outside of the table is ignored, and its values with it. `Rows` take the place of a
    table's gradient or update in a tree. Everything in ftrain accepts them; put `densify` before
    other transforms.

    >>> rows = Rows(jnp.array([2, 0, 2]), jnp.array([[1.0], [2.0], [3.0]]))
    >>> rows.to_dense(like=jnp.zeros((4, 1)))[:, 0].tolist()
    [2.0, 0.0, 4.0, 0.0]
    """

    indices: jax.Array  # [n]
    values: jax.Array  # [n, ...], each of the shape of a row
    # Known to list no row twice.
    unique: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        if isinstance(self.indices, np.ndarray):
            object.__setattr__(self, "indices", _within_int32(self.indices))

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "Rows":
        """Apply `function` to the values."""
        return dataclasses.replace(self, values=function(self.values))

    def to_dense(self, like: jax.Array) -> jax.Array:
        """Return the whole table, in the shape of `like`."""
        return self.add_to(jnp.zeros(like.shape, self.values.dtype))

    def add_to(self, table: jax.Array) -> jax.Array:
        """Return `table` plus these rows; in place, if the table's buffer may be reused."""
        values = self.values.astype(table.dtype)
        return table.at[self.indices].add(
            values, mode="drop", unique_indices=self.unique, wrap_negative_indices=False
        )

    def put_into(self, table: jax.Array, values: jax.Array) -> jax.Array:
        """Return `table` with these rows set to `values`; undefined for a row listed twice."""
        values = values.astype(table.dtype)
        return table.at[self.indices].set(
            values, mode="drop", unique_indices=self.unique, wrap_negative_indices=False
        )

    def take_from(self, table: jax.Array) -> jax.Array:
        """Return these rows of `table`; undefined for an index outside of the table."""
        return table.at[self.indices].get(mode="clip", wrap_negative_indices=False)

    def sum_duplicates(self, table: jax.Array | None = None) -> "Rows":
        """Return the same rows, each listed once, at the front; the other entries name no row.

        The values of the other entries are zero. With a `table`, rows outside of it are left out.
        Rows known to be unique are returned unchanged.
        """
        indices = wide_indices(self.indices)
        count = indices.shape[0]
        if self.unique or count == 0:
            return dataclasses.replace(self, indices=indices, unique=True)
        first = first_positions(indices)
        is_first = first == jnp.arange(count, dtype=jnp.int32)
        if table is not None:
            is_first &= self.is_within(table)
        ranks = jnp.cumsum(is_first, dtype=jnp.int32) - 1
        # The position `count` is out of range, so what is left out is dropped.
        places = jnp.where(is_first, ranks, count)[first]
        # Sums in bfloat16 would lose too much.
        wide = widen(self.values)
        summed = jnp.zeros_like(wide).at[places].add(wide, mode="drop").astype(self.values.dtype)
        named = nowhere(count, indices.dtype).at[places].set(indices, mode="drop")
        return dataclasses.replace(self, indices=named, values=summed, unique=True)

    def is_within(self, table: jax.Array) -> jax.Array:
        """Return for each index whether it names a row of `table`."""
        indices = wide_indices(self.indices)
        return (indices >= 0) & (indices < table.shape[0])


def densify() -> optax.GradientTransformationExtraArgs:
    """Make a transform that converts `Rows` to dense gradients, for those after it in a chain.

    The transforms after it cost time and memory for every row of the table.
    """

    def update(gradients: Tree, params: Tree | None) -> Tree:
        if params is None:
            raise ValueError(
                "densify needs the parameters' shapes: call update(gradients, state, params)"
            )
        return to_dense(gradients, params)

    return optax.with_extra_args_support(optax.stateless(update))


def to_dense(tree: Tree, like: Tree) -> Tree:
    """Replace every `Rows` of a tree by a dense array, in the shape of the leaf of `like`."""
    return jax.tree.map(
        lambda leaf, table: leaf.to_dense(table) if is_rows(leaf) else leaf,
        tree,
        like,
        is_leaf=lambda node: node is None or is_rows(node),
    )


def is_rows(node: object) -> TypeGuard[Rows]:
    """True for `Rows`; pass it as `is_leaf` to keep them whole."""
    return isinstance(node, Rows)


def map_values(function: Callable[[jax.Array], jax.Array], tree: Tree) -> Tree:
    """Apply `function` to every array of a tree; of `Rows`, to the values only."""
    return jax.tree.map(
        lambda leaf: leaf.map(function) if is_rows(leaf) else function(leaf), tree, is_leaf=is_rows
    )


def values_of(tree: Tree) -> list[jax.Array]:
    """Return the arrays of a tree; of `Rows`, the values."""
    leaves = jax.tree.leaves(tree, is_leaf=is_rows)
    return [leaf.values if is_rows(leaf) else leaf for leaf in leaves]


def wide_indices(indices: jax.Array) -> jax.Array:
    """Return indices in a dtype that can hold any row's number, and numbers outside of tables."""
    return jnp.asarray(indices).astype(jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32)


def nowhere(count: int, dtype: DTypeLike) -> jax.Array:
    """Return `count` different indices that name no row of any table."""
    return jnp.iinfo(dtype).max - jnp.arange(count, dtype=dtype)


@jax.jit
def first_positions(ids: jax.Array) -> jax.Array:
    """Return for each id of a non-empty list the first position of the same id.

    By hashing, because sorting is several times slower. Each round hashes the ids that are not
    placed yet into buckets. The first position in a bucket owns it, and all positions with the
    owner's id are placed. An owner has its own id, so every round places some.

    >>> first_positions(jnp.array([7, 3, 7, 7, 3])).tolist()
    [0, 1, 0, 0, 1]
    """
    count = ids.shape[0]
    positions = jnp.arange(count, dtype=jnp.int32)
    bits = (_BUCKETS_PER_ID * count - 1).bit_length()
    buckets = 1 << bits

    def place(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        round_number, first = carry
        missing = first < 0
        bucket = _hash(ids, round_number, bits)
        owners = (
            jnp.full(buckets, count, jnp.int32)
            .at[jnp.where(missing, bucket, buckets)]
            .min(positions, mode="drop")
        )
        owner = owners[bucket]
        placed = missing & (ids[jnp.minimum(owner, count - 1)] == ids)
        return round_number + 1, jnp.where(placed, owner, first)

    # Made like `ids`, which may differ between the devices of a mesh.
    nothing_placed = jnp.full_like(ids, -1, dtype=jnp.int32)
    start = (jnp.zeros((), jnp.uint32), nothing_placed)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1] < 0), place, start)[1]


def _hash(ids: jax.Array, round_number: jax.Array, bits: int) -> jax.Array:
    """The top `bits` of a product with an odd number, a different one in each round."""
    factor = jnp.uint32(0x9E3779B1) + 2 * jnp.uint32(0x42F0E1EB) * round_number
    mixed = ids.astype(jnp.uint32)
    mixed = (mixed ^ (mixed >> 15)) * factor
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0x85EBCA6B)
    return (mixed >> (32 - bits)).astype(jnp.int32)


def _within_int32(indices: np.ndarray) -> np.ndarray:
    """Replace 64-bit indices that jax would truncate to 32 bits, and so to other rows, by -1."""
    settings: Any = jax.config  # its attributes are defined at run time, unknown to a type checker
    if indices.dtype.kind not in "iu" or indices.dtype.itemsize < 8 or settings.jax_enable_x64:
        return indices
    is_outside = (indices < 0) | (indices > np.iinfo(np.int32).max)
    return np.where(is_outside, -1, indices).astype(np.int32)
