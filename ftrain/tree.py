"""Names and sizes of pytrees; the one format of a leaf's name: its keys joined by slashes."""

from typing import Any

import jax

Tree = Any  # a pytree of arrays: nested dicts, tuples, dataclasses, ...


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Every leaf under its name, in the tree's own order.

    >>> named_leaves({"dense": {"bias": 0, "kernel": 1}, "scales": [2, 3]})
    {'dense/bias': 0, 'dense/kernel': 1, 'scales/0': 2, 'scales/1': 3}
    """
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def count_elements(tree: Tree) -> int:
    """Numbers held by all leaves together: for parameters, the parameter count."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def count_bytes(tree: Tree) -> int:
    """Bytes held by all leaves together; works on `jax.ShapeDtypeStruct` leaves too."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
