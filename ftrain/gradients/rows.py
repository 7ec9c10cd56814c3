"""Rows: the gradient of a table of which a step reads a few rows, at a cost that does not depend on the table."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    unique: bool = dataclasses.field(default=False, metadata={"static": True})  # known to name no row twice

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "Rows":
        """`function` applied to the values."""
        return dataclasses.replace(self, values=function(self.values))

    def to_dense(self, like: jax.Array) -> jax.Array:
        """The whole table, in the shape of `like`."""
        return self.add_to(jnp.zeros(like.shape, self.values.dtype))

    def add_to(self, table: jax.Array) -> jax.Array:
        """`table` with these rows added; in place, where the table's buffer may be reused."""
        values = self.values.astype(table.dtype)
        return _at(table, self.indices).add(values, mode="drop", unique_indices=self.unique, **_NO_WRAPPING)

    def put_into(self, table: jax.Array, values: jax.Array) -> jax.Array:
        """`table` with `values` in these rows; which of two values for one row stays is not defined."""
        values = values.astype(table.dtype)
        return _at(table, self.indices).set(values, mode="drop", unique_indices=self.unique, **_NO_WRAPPING)

    def take_from(self, table: jax.Array) -> jax.Array:
        """What `table` holds in these rows; anything where an index names no row."""
        return _at(table, self.indices).get(mode="clip", **_NO_WRAPPING)

    def sum_duplicates(self, table: jax.Array | None = None) -> "Rows":
        """The same rows, none named twice, those that are named in front; what is left over names no row and is zero.

        With a `table`, what is not in it is left out.
        """
        if self.unique or self.indices.shape[0] == 0:
            return dataclasses.replace(self, unique=True)
        count = self.indices.shape[0]
        indices = self.indices.astype(jnp.int64 if self.indices.dtype.itemsize == 8 else jnp.int32)
        positions = jnp.arange(count, dtype=jnp.int32)
        first = first_positions(indices)
        is_first = first == positions
        if table is not None:
            is_first &= self.is_within(table)
        places = jnp.where(is_first, jnp.cumsum(is_first, dtype=jnp.int32) - 1, count)[first]  # `count` is out of it
        nowhere = jnp.iinfo(indices.dtype).max - positions.astype(indices.dtype)  # each place that is left its own
        return dataclasses.replace(
            self,
            indices=nowhere.at[places].set(indices, mode="drop"),
            values=jnp.zeros_like(self.values).at[places].add(self.values, mode="drop"),
            unique=True,
        )

    def is_within(self, table: jax.Array) -> jax.Array:
        """For each index, whether it names a row of `table`."""
        return (self.indices >= 0) & (self.indices < table.shape[0])


_NO_WRAPPING = {"wrap_negative_indices": False}  # -1 names no row, as in the reference, not the last one


def _at(table: jax.Array, indices: jax.Array) -> Any:
    return table.at[indices]


def is_rows(node: Any) -> bool:
    """Whether a node of a tree is `Rows`; what to pass as `is_leaf` to keep them whole."""
    return isinstance(node, Rows)


def map_values(function: Callable[[jax.Array], jax.Array], tree: Tree) -> Tree:
    """`function` applied to every array of a tree, of `Rows` to the values alone."""
    return jax.tree.map(lambda leaf: leaf.map(function) if is_rows(leaf) else function(leaf), tree, is_leaf=is_rows)


def values_of(tree: Tree) -> list[jax.Array]:
    """The arrays of a tree; of `Rows`, the values."""
    return [leaf.values if is_rows(leaf) else leaf for leaf in jax.tree.leaves(tree, is_leaf=is_rows)]


def to_dense(tree: Tree, like: Tree) -> Tree:
    """`tree` with every `Rows` as a whole table, in the shape of the leaf of `like` in its place."""
    return jax.tree.map(
        lambda leaf, table: leaf.to_dense(table) if is_rows(leaf) else leaf,
        tree,
        like,
        is_leaf=lambda node: node is None or is_rows(node),
    )


def densify() -> optax.GradientTransformation:
    """A transform that makes whole tables of `Rows`: it stands in a chain before transforms that know only arrays.

    From there on the cost of a step depends on the size of the table again.
    """

    def update(gradients: Tree, params: Tree | None) -> Tree:
        if params is None:
            raise ValueError("densify needs the parameters' shapes: call update(gradients, state, params)")
        return to_dense(gradients, params)

    return optax.stateless(update)
