"""Rows: the gradient of a table of which a step reads a few rows, at a cost that does not depend on the table."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ftrain.gradients.duplicates import first_positions
from ftrain.tree import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A table that is zero but for some rows: row `indices[i]` holds `values[i]`, and rows named twice add up.

    An index outside of the table names no row, and what it holds is dropped. It takes the place of a table's gradient
    or update in a tree. Of this toolkit, everything accepts it; `densify` stands before a transform that does not.

    >>> rows = Rows(jnp.array([2, 0, 2]), jnp.array([[1.0], [2.0], [3.0]]))
    >>> rows.to_dense(like=jnp.zeros((4, 1)))[:, 0].tolist()
    [2.0, 0.0, 4.0, 0.0]
    """

    indices: jax.Array  # [n]
    values: jax.Array  # [n, ...], each the shape of a row
    unique: bool = dataclasses.field(
        default=False, metadata={"static": True}
    )  # known to name no row twice

    def __post_init__(self) -> None:
        if isinstance(self.indices, np.ndarray):
            object.__setattr__(self, "indices", _within_int32(self.indices))

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "Rows":
        """`function` applied to the values."""
        return dataclasses.replace(self, values=function(self.values))

    def to_dense(self, like: jax.Array) -> jax.Array:
        """The whole table, in the shape of `like`."""
        return self.add_to(jnp.zeros(like.shape, self.values.dtype))

    def add_to(self, table: jax.Array) -> jax.Array:
        """`table` with these rows added; in place, where the table's buffer may be reused."""
        values = self.values.astype(table.dtype)
        return table.at[self.indices].add(
            values, mode="drop", unique_indices=self.unique, wrap_negative_indices=False
        )

    def put_into(self, table: jax.Array, values: jax.Array) -> jax.Array:
        """`table` with `values` in these rows; which of two values for one row stays is not defined."""
        values = values.astype(table.dtype)
        return table.at[self.indices].set(
            values, mode="drop", unique_indices=self.unique, wrap_negative_indices=False
        )

    def take_from(self, table: jax.Array) -> jax.Array:
        """What `table` holds in these rows; anything where an index names no row."""
        return table.at[self.indices].get(mode="clip", wrap_negative_indices=False)

    def sum_duplicates(self, table: jax.Array | None = None) -> "Rows":
        """The same rows, none named twice, those that are named in front; what is left over names no row and is zero.

        With a `table`, what is not in it is left out. Rows that are known to be unique are returned as they are.
        """
        indices, count = widen(self.indices), self.indices.shape[0]
        if self.unique or count == 0:
            return dataclasses.replace(self, indices=indices, unique=True)
        first = first_positions(indices)
        is_first = first == jnp.arange(count, dtype=jnp.int32)
        if table is not None:
            is_first &= self.is_within(table)
        places = jnp.where(is_first, jnp.cumsum(is_first, dtype=jnp.int32) - 1, count)[
            first
        ]  # `count` is out of it
        wide = self.values.astype(
            jnp.promote_types(self.values.dtype, jnp.float32)
        )  # sums lose too much in bfloat16
        summed = jnp.zeros_like(wide).at[places].add(wide, mode="drop").astype(self.values.dtype)
        named = nowhere(count, indices.dtype).at[places].set(indices, mode="drop")
        return dataclasses.replace(self, indices=named, values=summed, unique=True)

    def is_within(self, table: jax.Array) -> jax.Array:
        """For each index, whether it names a row of `table`."""
        indices = widen(self.indices)
        return (indices >= 0) & (indices < table.shape[0])


def _within_int32(indices: np.ndarray) -> np.ndarray:
    """Indices that jax keeps as they are: without 64 bits it would drop the upper half, and so name other rows."""
    settings: Any = (
        jax.config
    )  # jax defines its attributes at run time, where a type checker cannot see them
    if indices.dtype.kind not in "iu" or indices.dtype.itemsize < 8 or settings.jax_enable_x64:
        return indices
    return np.where((indices < 0) | (indices > np.iinfo(np.int32).max), -1, indices).astype(
        np.int32
    )


def widen(indices: jax.Array) -> jax.Array:
    """Indices in a type that can name any row, and what is no row."""
    return jnp.asarray(indices).astype(jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32)


def nowhere(count: int, dtype: Any) -> jax.Array:
    """So many indices that name no row of any table, each another one."""
    return jnp.iinfo(dtype).max - jnp.arange(count, dtype=dtype)


def is_rows(node: Any) -> bool:
    """Whether a node of a tree is `Rows`; what to pass as `is_leaf` to keep them whole."""
    return isinstance(node, Rows)


def map_values(function: Callable[[jax.Array], jax.Array], tree: Tree) -> Tree:
    """`function` applied to every array of a tree, of `Rows` to the values alone."""
    return jax.tree.map(
        lambda leaf: leaf.map(function) if is_rows(leaf) else function(leaf), tree, is_leaf=is_rows
    )


def values_of(tree: Tree) -> list[jax.Array]:
    """The arrays of a tree; of `Rows`, the values."""
    return [
        leaf.values if is_rows(leaf) else leaf for leaf in jax.tree.leaves(tree, is_leaf=is_rows)
    ]


def to_dense(tree: Tree, like: Tree) -> Tree:
    """`tree` with every `Rows` as a whole table, in the shape of the leaf of `like` in its place."""
    return jax.tree.map(
        lambda leaf, table: leaf.to_dense(table) if is_rows(leaf) else leaf,
        tree,
        like,
        is_leaf=lambda node: node is None or is_rows(node),
    )


def densify() -> optax.GradientTransformationExtraArgs:
    """A transform that makes whole tables of `Rows`: it stands in a chain before transforms that know only arrays.

    From there on the cost of a step depends on the size of the table again.
    """

    def update(gradients: Tree, params: Tree | None) -> Tree:
        if params is None:
            raise ValueError(
                "densify needs the parameters' shapes: call update(gradients, state, params)"
            )
        return to_dense(gradients, params)

    return optax.with_extra_args_support(optax.stateless(update))
