"""Clipping: gradients bounded by value or scaled down when they are too long, as pure functions over pytrees.

A leaf that is None stays None. Of `Rows` the values are taken as they stand, as in TensorFlow 1: a row that is named
twice counts twice in a norm. `ftrain.gradients.value_and_grad` and `make_step` name each row once, unless they are told
`merge_rows=False`, so that there the norm is that of the whole table's gradient; `Rows.sum_duplicates` merges others.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ftrain.gradients.rows import Rows, is_rows, map_values, values_of
from ftrain.gradients.sharing import share
from ftrain.hyperparameters import check_norm
from ftrain.tree import Tree, leaves_with_names

Bound = jax.typing.ArrayLike


def clip_by_value(tree: Tree, clip_value_min: Bound, clip_value_max: Bound) -> Tree:
    """max(min(leaf, clip_value_max), clip_value_min), element by element; bounds broadcast."""

    def clip(leaf: jax.Array) -> jax.Array:
        low, high = (jnp.asarray(bound, leaf.dtype) for bound in (clip_value_min, clip_value_max))
        return jnp.maximum(jnp.minimum(leaf, high), low)

    return map_values(clip, tree)


def clip_by_norm(tree: Tree, clip_norm: Bound, axes: int | tuple[int, ...] | None = None) -> Tree:
    """Each leaf by itself: leaf * clip_norm / max(norm, clip_norm), its norm taken along `axes`, or of the whole."""
    check_norm(clip_norm=clip_norm)

    def clip(leaf: jax.Array) -> jax.Array:
        wide = _widen(leaf)
        limit = jnp.maximum(jnp.asarray(clip_norm, wide.dtype), 0)
        norm = _norm(wide, axes)
        is_short = (norm <= limit) & (limit > 0)
        clipped = jnp.where(
            is_short, wide, wide * (limit / norm)
        )  # NaN if the norm is, or if both are 0
        return jnp.reshape(clipped, leaf.shape).astype(leaf.dtype)

    return map_values(clip, tree)


def clip_by_average_norm(tree: Tree, clip_norm: Bound) -> Tree:
    """Each leaf by itself: leaf * clip_norm / max(norm / size, clip_norm)."""
    check_norm(clip_norm=clip_norm)

    def clip(leaf: jax.Array) -> jax.Array:
        wide = _widen(leaf)
        limit = jnp.asarray(clip_norm, wide.dtype)
        inverse = wide.size / _norm(wide, None)
        scale = jnp.where(jnp.isinf(limit), 1, limit * jnp.minimum(inverse, 1 / limit))
        return jnp.reshape(wide * scale, leaf.shape).astype(leaf.dtype)

    return map_values(clip, tree)


def global_norm(tree: Tree) -> jax.Array:
    """The length of all leaves taken as one vector: sqrt(sum of squares), in float32 at least."""
    arrays = [share(jnp.asarray(array)) for array in values_of(tree)]
    arrays = [array.astype(jnp.promote_types(array.dtype, jnp.float32)) for array in arrays]
    return jnp.asarray(optax.tree.norm(arrays), dtype=None if arrays else jnp.result_type(float))


def clip_by_global_norm(
    tree: Tree, clip_norm: Bound, use_norm: Bound | None = None
) -> tuple[Tree, jax.Array]:
    """All leaves scaled by clip_norm * min(1 / norm, 1 / clip_norm), and the norm they had before.

    A norm that is not finite makes every leaf NaN, so that it cannot pass unseen. `use_norm` is the norm if it is
    already known.
    """
    check_norm(clip_norm=clip_norm)
    _check_inexact(tree)
    norm = global_norm(tree) if use_norm is None else jnp.asarray(use_norm)
    limit = jnp.asarray(clip_norm, norm.dtype)
    scale = jnp.where(jnp.isinf(limit), 1, limit * jnp.minimum(1 / norm, 1 / limit))
    scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)
    return map_values(lambda leaf: (leaf * scale).astype(leaf.dtype), tree), norm


def as_transform(
    function: Callable[..., Any], *arguments: Any, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """A function over gradients as a transform for `optax.chain`: `as_transform(clip_by_norm, 1.0)`."""

    def apply(gradients: Tree, params: Tree | None) -> Tree:
        del params
        result = function(gradients, *arguments, **options)
        return result[0] if function is clip_by_global_norm else result

    return optax.with_extra_args_support(optax.stateless(apply))


def _norm(values: jax.Array, axes: int | tuple[int, ...] | None) -> jax.Array:
    """The length of `values` along `axes`, which stay as axes of length 1; also of numbers whose squares overflow."""
    squares = jnp.sum(values * values, axis=axes, keepdims=True)
    largest = jnp.max(jnp.abs(values), axis=axes, keepdims=True, initial=0)
    scaled = values / jnp.where((largest == 0) | jnp.isinf(largest), 1, largest)
    careful = largest * jnp.sqrt(jnp.sum(scaled * scaled, axis=axes, keepdims=True))
    return jnp.where(jnp.isinf(squares), careful, jnp.sqrt(squares))


def _widen(leaf: jax.Array) -> jax.Array:
    """Squares of float16 numbers overflow, and sums of them lose most of their bits."""
    leaf = jnp.asarray(leaf)
    _check_inexact(leaf)
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _check_inexact(tree: Tree) -> None:
    for name, leaf in leaves_with_names(tree, is_rows):
        dtype = jnp.result_type(leaf.values if isinstance(leaf, Rows) else leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            where = f"leaf {name} is" if name else "got"
            raise TypeError(f"only floating-point numbers can be scaled to a norm; {where} {dtype}")
