"""Names, sizes and dtypes of pytrees. The name of a leaf is its keys joined by slashes."""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

T = TypeVar("T")
Tree = Any  # a pytree of arrays: nested dicts, tuples, dataclasses, ...


def named_leaves(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return every leaf by its name, in the order of the tree.

    >>> named_leaves({"dense": {"bias": 0, "kernel": 1}, "scales": [2, 3]})
    {'dense/bias': 0, 'dense/kernel': 1, 'scales/0': 2, 'scales/1': 3}
    """
    return dict(leaves_with_names(tree, is_leaf))


def leaves_with_names(
    tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Return every leaf with its name, in the order of the tree; names may repeat."""
    return [(_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_leaf)]


def leaves_like(
    tree: Tree, like: Tree, what: str, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Return what `tree` holds at each leaf of `like`; raise ValueError if one is missing.

    >>> leaves_like({"a": 1}, {"a": 0, "b": {"c": 0}}, "gradients")
    Traceback (most recent call last):
    ValueError: gradients and parameters differ: gradients have no b/c
    """
    structure = jax.tree.structure(like)
    try:
        return structure.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        found = named_leaves(tree, is_leaf)
        expected = named_leaves(like)
        missing = next((f"{what} have no {name}" for name in expected if name not in found), None)
        surplus = next(
            (f"parameters have no {name}" for name in found if name not in expected), None
        )
        raise ValueError(f"{what} and parameters differ: {missing or surplus or error}") from None


def matching_names(tree: Tree, patterns: Iterable[str], what: str) -> set[str]:
    """Return the names of the leaves that fully match one of these regular expressions.

    >>> tree = {"dense": {"bias": 0, "kernel": 1}, "scale": 2}
    >>> sorted(matching_names(tree, ["dense/.*"], "averages"))
    ['dense/bias', 'dense/kernel']
    """
    names = [*named_leaves(tree)]
    found: set[str] = set()
    for pattern in patterns:
        try:
            matched = {name for name in names if re.fullmatch(pattern, name)}
        except (re.error, TypeError) as error:
            raise ValueError(f"{what}: {pattern!r} is not a regular expression: {error}") from None
        if not matched:
            known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(
                f"{what}: pattern {pattern!r} matches no leaf; there are {known or 'none'}"
            )
        found |= matched
    return found


def nodes_of(tree: Tree, kind: type[T]) -> list[T]:
    """Return the nodes of a tree that are of this type; if nested, the outermost."""

    def is_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_kind) if isinstance(leaf, kind)]


def count_elements(tree: Tree) -> int:
    """Return the number of elements of all leaves: for parameters, the parameter count."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def count_bytes(tree: Tree) -> int:
    """Return the bytes of all leaves; works on `jax.ShapeDtypeStruct` leaves too."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def wide_dtype(*values: ArrayLike | DTypeLike) -> jnp.dtype:
    """Return the dtype to compute in: float32, or wider if one of these arrays or dtypes is.

    >>> wide_dtype(jnp.bfloat16)
    dtype('float32')
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(jnp.result_type(*values), jnp.float32)


def widen(values: ArrayLike) -> jax.Array:
    """Return `values` in float32 or wider."""
    array = jnp.asarray(values)
    return array.astype(wide_dtype(array))


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
