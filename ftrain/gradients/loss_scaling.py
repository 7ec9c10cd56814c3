"""Loss scaling: scale the loss up, so that half-precision gradients do not underflow."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ftrain.gradients.guard import Skipped, all_finite, check_transform, update_if
from ftrain.hyperparameters import check_count, check_finite, check_positive
from ftrain.tree import Tree, nodes_of

_MAX_SCALE = 2.0**100  # far below the largest float32, so that the loss itself does not overflow


class LossScaleState(NamedTuple):
    """The state of `loss_scaling`."""

    inner: Tree  # the state of the wrapped optimizer
    loss_scale: jax.Array  # the factor for the next loss
    skipped: Skipped
    since_change: jax.Array  # updates applied since the scale last changed


def loss_scaling(
    optimizer: optax.GradientTransformation,
    *,
    scale: float = 2.0**15,
    dynamic: bool = True,
    growth_interval: int = 2000,
    factor: float = 2.0,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `optimizer` for a loss that is multiplied by a scale before it is differentiated.

    A step of `make_step` multiplies the loss by `loss_scale(opt_state)` and divides the gradients
    before anything else uses them. An update whose gradients overflowed is skipped. With `dynamic`,
    the scale is then divided by `factor`, but not below 1. After `growth_interval` updates without
    overflow it is multiplied by `factor`.

    Put a `guard` inside, `loss_scaling(guard(optimizer))`, so that overflow is detected here first.
    """
    check_positive(scale=scale)
    check_finite(factor=factor)
    check_count(growth_interval=growth_interval)
    if not factor > 1:
        raise ValueError(f"factor must be > 1, got {factor}")
    check_transform(optimizer)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> LossScaleState:
        return LossScaleState(
            inner=inner.init(params),
            loss_scale=jnp.asarray(scale, jnp.float32),
            skipped=Skipped(jnp.zeros((), jnp.int32)),
            since_change=jnp.zeros((), jnp.int32),
        )

    def update(gradients: Tree, state: LossScaleState, params: Tree | None = None, **extra: Any):
        good = all_finite(gradients)
        updates, inner_state = update_if(good, inner, gradients, state.inner, params, **extra)
        since_change = jnp.where(good, state.since_change + 1, 0)
        new_scale = state.loss_scale
        if dynamic:
            grows = since_change >= growth_interval
            larger = jnp.where(grows, jnp.minimum(new_scale * factor, _MAX_SCALE), new_scale)
            new_scale = jnp.where(good, larger, jnp.maximum(new_scale / factor, 1.0))
            since_change = jnp.where(grows, 0, since_change)
        skipped = Skipped(state.skipped.so_far + (~good).astype(jnp.int32))
        return updates, LossScaleState(inner_state, new_scale, skipped, since_change)

    return optax.GradientTransformationExtraArgs(
        init,
        update,  # pyright: ignore[reportArgumentType] - optax's type is for any state
    )


def loss_scale(opt_state: Tree) -> jax.Array | None:
    """Return the factor for the loss; None if the optimizer was not made by `loss_scaling`."""
    found = nodes_of(opt_state, LossScaleState)
    return found[0].loss_scale if found else None
