"""Clipping: gradients scaled down when they are too long."""

import jax
import jax.numpy as jnp
import optax

from ftrain.tree import Tree


def global_norm(tree: Tree) -> jax.Array:
    """The length of all leaves taken as one vector: sqrt(sum of squares)."""
    return optax.tree.norm(tree)


def clip_by_global_norm(
    tree: Tree, clip_norm: jax.typing.ArrayLike, use_norm: jax.typing.ArrayLike | None = None
) -> tuple[Tree, jax.Array]:
    """All leaves scaled by clip_norm / max(norm, clip_norm), and the norm they had before.

    A norm that is not finite makes every leaf NaN, so that it cannot pass unseen. `use_norm` is the norm if it is
    already known.
    """
    norm = global_norm(tree) if use_norm is None else jnp.asarray(use_norm)
    scale = jnp.where(jnp.isfinite(norm), clip_norm / jnp.maximum(norm, clip_norm), jnp.nan)
    return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), tree), norm
