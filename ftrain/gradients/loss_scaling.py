"""Loss scaling: gradients in half precision kept from vanishing, by differentiating a multiple of the loss."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ftrain.gradients.skipping import Skipped, all_finite, check_transform, update_if
from ftrain.hyperparameters import check_count, check_finite, check_positive
from ftrain.tree import Tree, nodes_of

_LARGEST = 2.0**100  # far from the end of float32, which a loss must not reach


class LossScaleState(NamedTuple):
    inner: Tree  # the state of the optimizer behind it
    loss_scale: jax.Array  # what the next loss is to be multiplied by
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
    """`optimizer` for a loss that is multiplied by a scale before it is differentiated.

    A step of `make_step` does both: it multiplies the loss by `loss_scale(opt_state)`, and divides the gradients again
    before anything looks at them. An update whose gradients overflowed is skipped. With `dynamic`, the scale is then
    divided by `factor`, not below 1, and it is multiplied by `factor` after `growth_interval` updates that did not.

    A `guard` belongs inside, `loss_scaling(guard(optimizer))`: overflow is then seen here first.
    """
    check_positive(scale=scale)
    check_finite(factor=factor)
    check_count(growth_interval=growth_interval)
    if not factor > 1:
        raise ValueError(f"factor must be > 1, got {factor}")
    check_transform(optimizer)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> LossScaleState:
        skipped, since_change = (jnp.zeros((), jnp.int32) for _ in range(2))
        return LossScaleState(
            inner.init(params), jnp.asarray(scale, jnp.float32), Skipped(skipped), since_change
        )

    def update(gradients: Tree, state: LossScaleState, params: Tree | None = None, **extra: Any):
        good = all_finite(gradients)
        updates, inner_state = update_if(good, inner, gradients, state.inner, params, **extra)
        since_change = jnp.where(good, state.since_change + 1, 0)
        new_scale = state.loss_scale
        if dynamic:
            grows = since_change >= growth_interval
            larger = jnp.where(grows, jnp.minimum(new_scale * factor, _LARGEST), new_scale)
            new_scale = jnp.where(good, larger, jnp.maximum(new_scale / factor, 1.0))
            since_change = jnp.where(grows, 0, since_change)
        skipped = Skipped(state.skipped.so_far + (~good).astype(jnp.int32))
        return updates, LossScaleState(inner_state, new_scale, skipped, since_change)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType] - params are narrower


def loss_scale(opt_state: Tree) -> jax.Array | None:
    """What a loss is to be multiplied by before it is differentiated, if its optimizer was made by `loss_scaling`."""
    found = nodes_of(opt_state, LossScaleState)
    return found[0].loss_scale if found else None
