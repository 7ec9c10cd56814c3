"""The guard: skip updates that are non-finite or much larger than usual."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ftrain.gradients.clipping import global_norm
from ftrain.gradients.conditional_update import Skipped, all_finite, check_transform, update_if
from ftrain.hyperparameters import check_count
from ftrain.tree import Tree


class GuardState(NamedTuple):
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

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType] - params are narrower
