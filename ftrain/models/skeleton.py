"""The arrays of a library's object as nested dicts, and the rest of it, which stays as it is."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ftrain.tree import Tree

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A pytree without its arrays: `fill` puts arrays back in their places."""

    structure: Any
    names: tuple[Names | None, ...]  # of each leaf; None for a leaf that is no array
    others: tuple[Any, ...]  # the leaves that are no arrays, and None for each array

    def fill(self, what: str, arrays: Tree) -> Any:
        """Return the pytree with these arrays; `what` names them in errors."""
        leaves = [
            other if names is None else _find(what, arrays, names)
            for names, other in zip(self.names, self.others, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def separate(
    tree: Any, is_chosen: Callable[[Any], bool], *, name: Callable[[Any], str | None] | None = None
) -> tuple[dict[str, Any], Skeleton]:
    """Return the chosen leaves as nested dicts, and the rest.

    Objects made by one function may hold functions that are not equal, and so have different tree
    structures. Therefore only arrays go into the state of a run; the rest stays with the model.

    Args:
      name: the name of an entry of a key path, or None to leave it out.
    """
    found: dict[str, Any] = {}
    names: list[Names | None] = []
    others: list[Any] = []
    paths, structure = jax.tree.flatten_with_path(tree)
    for path, leaf in paths:
        if not is_chosen(leaf):
            names.append(None)
            others.append(leaf)
            continue
        parts = [(name or entry_name)(entry) for entry in path]
        kept = tuple(part for part in parts if part is not None) or ("value",)
        _store(found, kept, leaf)
        names.append(kept)
        others.append(None)
    return found, Skeleton(structure, tuple(names), tuple(others))


def is_array(leaf: Any) -> bool:
    """Return True for arrays of jax and numpy and for random keys, not for numbers of Python."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def entry_name(entry: Any) -> str:
    """Return the name of an entry of a key path."""
    return jax.tree_util.keystr((entry,), simple=True)


class Traced:
    """A function of a key that returns a tree of arrays, and something that has no arrays.

    A call returns the arrays, computed by a compiled function. `rest` is the other part; no array
    is computed for it.
    """

    def __init__(self, function: Callable[[jax.Array], tuple[Tree, Any]]):
        self._function = function
        self._arrays = jax.jit(lambda rng: function(rng)[0])

    def __call__(self, rng: jax.Array) -> Tree:
        return self._arrays(rng)

    @functools.cached_property
    def rest(self) -> Any:
        """What the function returns next to the arrays."""
        found: list[Any] = []

        def trace(rng: jax.Array) -> Tree:
            arrays, rest = self._function(rng)
            found.append(rest)
            return arrays

        jax.eval_shape(trace, jax.random.key(0))
        return found[0]


def _store(found: dict[str, Any], names: Names, leaf: Any) -> None:
    node = found
    for part in names[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ValueError(f"two leaves of the model are named {'/'.join(names)}")
    if names[-1] in node:
        raise ValueError(f"two leaves of the model are named {'/'.join(names)}")
    node[names[-1]] = leaf


def _find(what: str, arrays: Tree, names: Names) -> Any:
    node = arrays
    for part in names:
        try:
            node = node[part]
        except (KeyError, TypeError, IndexError):
            raise ValueError(
                f"{what} has no leaf {'/'.join(names)}, which the model needs; "
                "pass what its init returned, or a tree of the same structure"
            ) from None
    return node
