"""Skipping: an update that is applied or not, as a number on the device decides."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ftrain.gradients.rows import Rows, is_rows, nowhere, values_of
from ftrain.gradients.sealing import SealedRows, seal, unseal
from ftrain.tree import Tree, nodes_of


def update_if(
    wanted: jax.Array,
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: Tree,
    state: Tree,
    params: Tree | None,
    **extra: Any,
) -> tuple[Tree, Tree]:
    """`optimizer.update`, or else updates of zero and the same state.

    A conditional, not a choice between two results: that would copy every table.
    """
    was_sealed = any(
        isinstance(leaf, SealedRows) for leaf in jax.tree.leaves(gradients, is_leaf=is_rows)
    )

    def apply(gradients: Tree, state: Tree) -> tuple[Tree, Tree]:
        updates, state = optimizer.update(
            seal(gradients) if was_sealed else gradients, state, params, **extra
        )
        return unseal(updates), state

    def skip(gradients: Tree, state: Tree) -> tuple[Tree, Tree]:
        shapes, _ = jax.eval_shape(apply, gradients, state)
        return jax.tree.map(_nothing, shapes, is_leaf=is_rows), state

    updates, state = jax.lax.cond(wanted, apply, skip, unseal(gradients), state)
    return seal(updates) if was_sealed else updates, state


def check_transform(optimizer: Any) -> None:
    if not isinstance(optimizer, optax.GradientTransformation):
        turned = (
            ".gradient_transformation()" if hasattr(optimizer, "gradient_transformation") else ""
        )
        hint = f"; call its {turned}" if turned else ""
        raise TypeError(
            f"optimizer must be an optax.GradientTransformation, such as adam(0.001), got {optimizer!r:.80}{hint}"
        )


def all_finite(tree: Tree) -> jax.Array:
    """Whether every number of a tree is finite."""
    return jnp.array([jnp.isfinite(leaf).all() for leaf in values_of(tree)], bool).all()


class Skipped(NamedTuple):
    """In the state of a transform that skips updates: how many of them."""

    so_far: jax.Array


def skipped_updates(opt_state: Tree) -> jax.Array | None:
    """How many updates were skipped so far, if there is a transform in the optimizer that skips some."""
    counts = nodes_of(opt_state, Skipped)
    return sum((count.so_far for count in counts), jnp.int32(0)) if counts else None


def _nothing(like: Any) -> Any:
    """An update that changes nothing, in the shape of another one."""
    if not isinstance(like, Rows):
        return jnp.zeros(like.shape, like.dtype)
    indices = nowhere(like.indices.shape[0], like.indices.dtype)
    return Rows(indices, jnp.zeros(like.values.shape, like.values.dtype), like.unique)
