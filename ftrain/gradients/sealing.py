"""Sealed rows: how a transform that does not know `Rows` is found out, before it does harm."""

import warnings
from typing import Any, NoReturn

import jax
import optax

from ftrain.gradients.rows import Rows, is_rows, to_dense
from ftrain.tree import Tree


class TakenApartError(TypeError):
    """A function over trees took `Rows` apart, instead of taking them as a gradient."""


class SealedRows(Rows):
    """`Rows` that are one leaf of a tree, and a leaf that no arithmetic can use.

    A transform that does not know them would treat indices as numbers and be silently wrong. Sealed, it fails.
    """


class _Seal:
    """What a function over trees finds in the place of sealed rows."""

    __slots__ = ("_rows",)

    def __init__(self, rows: SealedRows):
        self._rows = rows

    def __getattr__(self, name: str) -> NoReturn:
        raise TakenApartError(
            f"a transform asked Rows for {name}: put ftrain.gradients.densify() before it"
        )


def _open(_: None, children: tuple[Any]) -> Any:
    return children[0]._rows if isinstance(children[0], _Seal) else children[0]


jax.tree_util.register_pytree_node(SealedRows, lambda rows: ((_Seal(rows),), None), _open)


def seal(tree: Tree) -> Tree:
    """`tree` with every `Rows` sealed."""
    return _rebuild(SealedRows, tree)


def unseal(tree: Tree) -> Tree:
    """`tree` with ordinary `Rows` again."""
    return _rebuild(Rows, tree)


def update_with_rows(
    optimizer: optax.GradientTransformation,
    gradients: Tree,
    state: Tree,
    params: Tree,
    **extra: Any,
) -> tuple[Tree, Tree]:
    """`optimizer.update`, with `Rows` as whole tables if one of its transforms does not know them.

    Without it, a transform such as `optax.scale` would take the indices of `Rows` for numbers. `extra` is passed on,
    and the gradients again as `grad`: some optimizers search along them.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    try:
        sealed = seal(gradients)
        updates, new_state = optimizer.update(sealed, state, params, grad=sealed, **extra)
        return unseal(updates), new_state
    except (TypeError, ValueError):  # of a seal, or of jax when it is handed one
        if not any(map(is_rows, jax.tree.leaves(gradients, is_leaf=is_rows))):
            raise
        whole = to_dense(gradients, params)
        updates, new_state = optimizer.update(whole, state, params, grad=whole, **extra)
        warnings.warn(_MADE_DENSE, stacklevel=3)
        return updates, new_state


_MADE_DENSE = (
    "a transform of the optimizer does not know Rows, so the gradients of tables are made whole, and a step costs time "
    "and memory for every row. ftrain's optimizers and clipping take Rows; ftrain.gradients.densify() before that "
    "transform says that this is meant"
)


def _rebuild(kind: type[Rows], tree: Tree) -> Tree:
    def rebuild(leaf: Any) -> Any:
        return kind(leaf.indices, leaf.values, leaf.unique) if is_rows(leaf) else leaf

    return jax.tree.map(rebuild, tree, is_leaf=is_rows)
