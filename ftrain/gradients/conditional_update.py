"""Conditional update: an update that is applied or skipped, as a boolean on the device decides."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ftrain.gradients.rows import Rows, is_rows, nowhere, values_of
from ftrain.gradients.rows_fallback import OpaqueRows, from_opaque, to_opaque
from ftrain.tree import Tree, nodes_of


class Skipped(NamedTuple):
    """Part of the state of every transform that skips updates: how many it skipped."""

    so_far: jax.Array


def skipped_updates(opt_state: Tree) -> jax.Array | None:
    """Return how many updates were skipped so far; None if no transform skips any."""
    counts = nodes_of(opt_state, Skipped)
    return sum((count.so_far for count in counts), jnp.int32(0)) if counts else None


def update_if(
    condition: jax.Array,
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: Tree,
    state: Tree,
    params: Tree | None,
    **extra: Any,
) -> tuple[Tree, Tree]:
    """Call `optimizer.update` if `condition` holds; else return zero updates and the same state.

    This is a `jax.lax.cond`: to select between two results would copy every table.
    """
    leaves = jax.tree.leaves(gradients, is_leaf=is_rows)
    is_opaque = any(isinstance(leaf, OpaqueRows) for leaf in leaves)

    def apply(gradients: Tree, state: Tree) -> tuple[Tree, Tree]:
        given = to_opaque(gradients) if is_opaque else gradients
        updates, state = optimizer.update(given, state, params, **extra)
        return from_opaque(updates), state

    def skip(gradients: Tree, state: Tree) -> tuple[Tree, Tree]:
        shapes, _ = jax.eval_shape(apply, gradients, state)
        return jax.tree.map(_zero_update, shapes, is_leaf=is_rows), state

    updates, state = jax.lax.cond(condition, apply, skip, from_opaque(gradients), state)
    return to_opaque(updates) if is_opaque else updates, state


def check_transform(optimizer: Any) -> None:
    """Raise TypeError if `optimizer` is not an optax transform."""
    if not isinstance(optimizer, optax.GradientTransformation):
        has_method = hasattr(optimizer, "gradient_transformation")
        hint = "; call its .gradient_transformation()" if has_method else ""
        raise TypeError(
            "optimizer must be an optax.GradientTransformation, such as adam(0.001), "
            f"got {optimizer!r:.80}{hint}"
        )


def all_finite(tree: Tree) -> jax.Array:
    """Return whether every number of a tree is finite."""
    return jnp.array([jnp.isfinite(leaf).all() for leaf in values_of(tree)], bool).all()


def _zero_update(like: Any) -> Any:
    """An update of the same form that changes nothing."""
    if not isinstance(like, Rows):
        return jnp.zeros(like.shape, like.dtype)
    indices = nowhere(like.indices.shape[0], like.indices.dtype)
    return Rows(indices, jnp.zeros(like.values.shape, like.values.dtype), like.unique)
