"""The guard: skip updates that are non-finite or much larger than usual.

`update_if` applies or skips an update by a condition on the device, for other transforms too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ftrain.gradients.clipping import global_norm
from ftrain.gradients.rows import Rows, is_rows, nowhere, values_of
from ftrain.gradients.rows_fallback import OpaqueRows, from_opaque, to_opaque
from ftrain.hyperparameters import check_count
from ftrain.tree import Tree, nodes_of


class Skipped(NamedTuple):
    """Part of the state of every transform that skips updates: how many it skipped."""

    so_far: jax.Array


class GuardState(NamedTuple):
    """The state of `guard`."""

    inner: Tree  # the state of the wrapped optimizer
    skipped: Skipped
    in_a_row: jax.Array  # updates skipped since the last one that was applied
    applied: jax.Array  # updates applied so far
    usual_norm: jax.Array  # the running mean of the gradient's norm, over applied updates


def guard(
    optimizer: optax.GradientTransformation,
    *,
    spike: float | None = None,
    window: int = 100,
    patience: int = 10,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `optimizer`: skip updates from non-finite gradients, and keep its state.

    A step of `make_step` then has the metrics `update_skipped`, for this step, and
    `updates_skipped`, for all so far, and `StopOnNaN` ignores a step that was skipped.

    Args:
      spike: also skip gradients whose norm is more than `spike` times the running mean of norms.
      window: the approximate number of updates in that mean; spikes are detected after as many.
      patience: how many updates in a row may be skipped. The next one is applied: a diverged
        training stops at its NaN, and a lasting increase of the norm becomes the new mean.
    """
    if spike is not None and not spike > 1:
        raise ValueError(f"spike must be > 1, got {spike}")
    check_count(window=window, patience=patience)
    check_transform(optimizer)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> GuardState:
        return GuardState(
            inner=inner.init(params),
            skipped=Skipped(jnp.zeros((), jnp.int32)),
            in_a_row=jnp.zeros((), jnp.int32),
            applied=jnp.zeros((), jnp.int32),
            usual_norm=jnp.zeros((), jnp.float32),
        )

    def update(gradients: Tree, state: GuardState, params: Tree | None = None, **extra: Any):
        norm = global_norm(gradients).astype(jnp.float32)
        good = all_finite(gradients)
        if spike is not None:
            good &= ~((norm > spike * state.usual_norm) & (state.applied >= window))
        good |= state.in_a_row >= patience
        updates, inner_state = update_if(good, inner, gradients, state.inner, params, **extra)
        share = 1 / jnp.minimum(state.applied + 1, window)
        usual = state.usual_norm + share * (norm - state.usual_norm)
        bad = (~good).astype(jnp.int32)
        return updates, GuardState(
            inner=inner_state,
            skipped=Skipped(state.skipped.so_far + bad),
            in_a_row=(state.in_a_row + 1) * bad,
            applied=state.applied + 1 - bad,
            usual_norm=jnp.where(good & jnp.isfinite(usual), usual, state.usual_norm),
        )

    return optax.GradientTransformationExtraArgs(
        init,
        update,  # pyright: ignore[reportArgumentType] - optax's type is for any state
    )


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


def check_transform(optimizer: object) -> None:
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
