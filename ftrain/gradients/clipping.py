"""Norms and clipping: gradients bounded by value, or scaled down if their norm is too large.

All functions are pure functions over pytrees. A leaf that is None stays None. The norm of `Rows` is
the norm of their values, as in TensorFlow 1: a row that is listed twice counts twice.
`value_and_grad` and `make_step` list each row once, unless called with `merge_rows=False`; the norm
is then the norm of the dense gradient. `Rows.sum_duplicates` merges other rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftrain.gradients.rows import Rows, is_rows, map_values, values_of
from ftrain.hyperparameters import check_norm
from ftrain.tree import Tree, leaves_with_names, wide_dtype, widen

Bound = jax.typing.ArrayLike

_MIN_SHARDED_SIZE = 1 << 16  # elements; below, sharding a sum costs more than it saves
_replicating_mesh: ContextVar[Mesh | None] = ContextVar("replicating_mesh", default=None)


class ScheduledState(NamedTuple):
    """The state of a transform of `as_transform` with a schedule."""

    # Updates so far.
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] - as in optax


def clip_by_value(tree: Tree, clip_value_min: Bound, clip_value_max: Bound) -> Tree:
    """max(min(leaf, clip_value_max), clip_value_min), elementwise; bounds broadcast."""

    def clip(leaf: jax.Array) -> jax.Array:
        low = jnp.asarray(clip_value_min, leaf.dtype)
        high = jnp.asarray(clip_value_max, leaf.dtype)
        return jnp.maximum(jnp.minimum(leaf, high), low)

    return map_values(clip, tree)


def clip_by_norm(tree: Tree, clip_norm: Bound, axes: int | tuple[int, ...] | None = None) -> Tree:
    """leaf * clip_norm / max(norm, clip_norm) for each leaf, with the norm along `axes` or all."""
    check_norm(clip_norm=clip_norm)

    def clip(leaf: jax.Array) -> jax.Array:
        wide = _widen(leaf)
        limit = jnp.maximum(jnp.asarray(clip_norm, wide.dtype), 0)
        norm = _norm(wide, axes)
        is_short = (norm <= limit) & (limit > 0)
        # NaN if the norm is NaN, or if norm and limit are both 0.
        clipped = jnp.where(is_short, wide, wide * (limit / norm))
        return jnp.reshape(clipped, leaf.shape).astype(leaf.dtype)

    return map_values(clip, tree)


def clip_by_average_norm(tree: Tree, clip_norm: Bound) -> Tree:
    """leaf * clip_norm / max(norm / size, clip_norm) for each leaf."""
    check_norm(clip_norm=clip_norm)

    def clip(leaf: jax.Array) -> jax.Array:
        wide = _widen(leaf)
        limit = jnp.asarray(clip_norm, wide.dtype)
        inverse = wide.size / _norm(wide, None)
        scale = jnp.where(jnp.isinf(limit), 1, limit * jnp.minimum(inverse, 1 / limit))
        return jnp.reshape(wide * scale, leaf.shape).astype(leaf.dtype)

    return map_values(clip, tree)


def global_norm(tree: Tree) -> jax.Array:
    """The norm of all leaves as one vector: sqrt(sum of squares), in float32 or wider."""
    arrays = [widen(_shard(jnp.asarray(array))) for array in values_of(tree)]
    return jnp.asarray(optax.tree.norm(arrays), dtype=None if arrays else jnp.result_type(float))


def clip_by_global_norm(
    tree: Tree, clip_norm: Bound, use_norm: Bound | None = None
) -> tuple[Tree, jax.Array]:
    """Scale all leaves by clip_norm * min(1 / norm, 1 / clip_norm); return them and their norm.

    A non-finite norm makes every leaf NaN, so that it cannot go unnoticed. Pass the norm as
    `use_norm` if it is already known.
    """
    check_norm(clip_norm=clip_norm)
    _check_inexact(tree)
    norm = global_norm(tree) if use_norm is None else jnp.asarray(use_norm)
    limit = jnp.asarray(clip_norm, norm.dtype)
    scale = jnp.where(jnp.isinf(limit), 1, limit * jnp.minimum(1 / norm, 1 / limit))
    scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)

    def apply_scale(leaf: jax.Array) -> jax.Array:
        wide = wide_dtype(leaf, scale)
        return (leaf.astype(wide) * scale.astype(wide)).astype(leaf.dtype)

    return map_values(apply_scale, tree), norm


def as_transform(
    function: Callable[..., Any], *arguments: Any, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Make a transform from a function over gradients: `as_transform(clip_by_norm, 1.0)`.

    An argument that is itself a function is a schedule, of the number of updates.
    """
    is_scheduled = any(map(callable, (*arguments, *options.values())))

    def apply(gradients: Tree, at: Callable[[Any], Any] = lambda value: value) -> Tree:
        given = {name: at(value) for name, value in options.items()}
        result = function(gradients, *map(at, arguments), **given)
        return result[0] if function is clip_by_global_norm else result

    def update(
        gradients: Tree, state: ScheduledState, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, ScheduledState]:
        del params, extra
        clipped = apply(gradients, lambda each: each(state.count) if callable(each) else each)
        return clipped, ScheduledState(state.count + 1)

    if not is_scheduled:
        return optax.with_extra_args_support(
            optax.stateless(lambda gradients, params: apply(gradients))
        )
    return optax.GradientTransformationExtraArgs(
        lambda params: ScheduledState(jnp.zeros((), jnp.int32)),
        update,  # pyright: ignore[reportArgumentType] - optax's type is for any state
    )


@contextmanager
def shard_global_norm(mesh: Mesh | None) -> Iterator[None]:
    """While this is active, `global_norm` splits large arrays over the devices of `mesh`.

    For a step that is traced for a mesh on which every device holds whole arrays: otherwise each
    device would compute the whole norm again.
    """
    token = _replicating_mesh.set(mesh)
    try:
        yield
    finally:
        _replicating_mesh.reset(token)


def _shard(array: jax.Array) -> jax.Array:
    """Flatten a large replicated array and shard it over the devices."""
    mesh = _replicating_mesh.get()
    if mesh is None or array.size < _MIN_SHARDED_SIZE or array.size % mesh.size:
        return array
    over_all_axes = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.lax.with_sharding_constraint(array.reshape(-1), over_all_axes)


def _norm(values: jax.Array, axes: int | tuple[int, ...] | None) -> jax.Array:
    """The norm along `axes`, kept with length 1; correct also if the squares overflow."""
    squares = jnp.sum(values * values, axis=axes, keepdims=True)
    largest = jnp.max(jnp.abs(values), axis=axes, keepdims=True, initial=0)
    scaled = values / jnp.where((largest == 0) | jnp.isinf(largest), 1, largest)
    without_overflow = largest * jnp.sqrt(jnp.sum(scaled * scaled, axis=axes, keepdims=True))
    return jnp.where(jnp.isinf(squares), without_overflow, jnp.sqrt(squares))


def _widen(leaf: jax.Array) -> jax.Array:
    """Squares of float16 numbers overflow, and sums of them lose most of their bits."""
    _check_inexact(leaf)
    return widen(leaf)


def _check_inexact(tree: Tree) -> None:
    for name, leaf in leaves_with_names(tree, is_rows):
        dtype = jnp.result_type(leaf.values if isinstance(leaf, Rows) else leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            where = f"leaf {name} is" if name else "got"
            raise TypeError(f"only floating-point numbers can be scaled to a norm; {where} {dtype}")
