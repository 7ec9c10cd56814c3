"""Rows fallback: dense gradients for optimizers that do not support `Rows`.

Whether an optimizer supports rows cannot be marked on it: `optax.chain`, `masked`,
`multi_transform` and `inject_hyperparams` build a new transform and drop any mark, and whether a
`multi_transform` supports rows depends on which of its transforms receives the table. So the update
itself is the test. It runs with `OpaqueRows`, which can be used as `Rows` and in no other way:
every use as an array raises `RowsNotSupportedError`. Only this exception selects the fallback;
every other one is an error.
"""

import warnings
from typing import Any, NoReturn

import jax
import optax

from ftrain.gradients.rows import Rows, is_rows, to_dense
from ftrain.tree import Tree


class RowsNotSupportedError(Exception):
    """A transform used `Rows` as an array, or refuses them.

    Not a TypeError: jax replaces a TypeError of an argument by one of its own.
    """


class OpaqueRows(Rows):
    """`Rows` that are a leaf of a tree, not a node, and that raise when used as an array.

    jax knows `Rows` as a node with the leaves `indices` and `values`. A transform that does not
    support them would scale the indices along with the values, without any error.
    """

    __array_ufunc__ = None  # makes numpy call the methods below

    def __getattr__(self, name: str) -> NoReturn:
        raise RowsNotSupportedError(
            f"a transform used Rows as an array ({name}): put ftrain.gradients.densify() before it"
        )


# Python looks up operators on the class, where __getattr__ does not see them. jax asks the instance
# for __jax_array__, and a class that had it would make jax raise an error of its own. "repr" is for
# transforms that check types, such as optax.adagrad: they format what they refuse into an error.
_OPERATORS = (
    *("repr", "array", "bool", "int", "float", "index", "len", "iter", "getitem"),
    *("neg", "pos", "abs", "invert", "round", "lt", "le", "gt", "ge", "eq", "ne"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    *("rand", "ror", "rxor"),
)
for _operator in _OPERATORS:
    _name = f"__{_operator}__"
    setattr(OpaqueRows, _name, lambda self, *_, name=_name, **__: self.__getattr__(name))


def update_with_rows(
    optimizer: optax.GradientTransformation,
    gradients: Tree,
    state: Tree,
    params: Tree,
    **extra: Any,
) -> tuple[Tree, Tree]:
    """Call `optimizer.update`; convert `Rows` to whole tables if a transform does not support them.

    Without this function, a transform such as `optax.scale` would treat the indices of `Rows` as
    numbers. `extra` is passed on, and the gradients a second time as `grad`: some optimizers search
    along them.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    if not any(map(is_rows, jax.tree.leaves(gradients, is_leaf=is_rows))):
        return optimizer.update(gradients, state, params, grad=gradients, **extra)
    opaque = to_opaque(gradients)
    try:
        updates, new_state = optimizer.update(opaque, state, params, grad=opaque, **extra)
    except RowsNotSupportedError:
        dense = to_dense(gradients, params)
        updates, new_state = optimizer.update(dense, state, params, grad=dense, **extra)
        warnings.warn(_MADE_DENSE, stacklevel=3)
    return from_opaque(updates), new_state


_MADE_DENSE = (
    "a transform of the optimizer does not support Rows, so the gradients of tables are made "
    "dense, and a step costs time and memory for every row. ftrain's optimizers and clipping "
    "support Rows. If this is intended, put ftrain.gradients.densify() before that transform"
)


def to_opaque(tree: Tree) -> Tree:
    """Replace every `Rows` of a tree by `OpaqueRows`."""
    return _rebuild(OpaqueRows, tree)


def from_opaque(tree: Tree) -> Tree:
    """Replace every `OpaqueRows` of a tree by ordinary `Rows`."""
    return _rebuild(Rows, tree)


def _rebuild(kind: type[Rows], tree: Tree) -> Tree:
    def rebuild(leaf: Any) -> Any:
        return kind(leaf.indices, leaf.values, leaf.unique) if is_rows(leaf) else leaf

    return jax.tree.map(rebuild, tree, is_leaf=is_rows)
