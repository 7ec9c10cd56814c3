"""What a precision policy does to an optimizer: slots in another dtype, and loss scaling."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core.primitives import random_bits_p, threefry2x32_p
from jax.typing import DTypeLike

from ftrain.gradients import loss_scale, loss_scaling
from ftrain.jaxpr import equations_of
from ftrain.optimizers.rounding import REMAINDER, is_narrow, noise_key, store
from ftrain.optimizers.slots import OptimizerState
from ftrain.tree import Tree, nodes_of, widen


class StoredSlots(NamedTuple):
    """The state of an optimizer whose slots are stored in another dtype than it computes in."""

    inner: Tree
    # Updates so far, for the random numbers of the rounding.
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] - as in optax


def store_slots(
    optimizer: optax.GradientTransformation, dtype: DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """Keep the slots of an optimizer in `dtype`: all floating-point arrays of its state.

    ftrain's own optimizers compute in float32 whatever the dtype of their slots, so theirs are cast
    once. Those of others are cast to float32 for each update, and rounded stochastically after it.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Tree:
        state = inner.init(params)
        is_foreign = any(_is_slot(leaf) for leaf in _leaves_of_others(state))
        state = jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_slot(leaf) else leaf, state)
        return StoredSlots(state, jnp.zeros((), jnp.int32)) if is_foreign else state

    def update(gradients: Tree, state: Tree, params: Tree | None = None, **extra: Any):
        if not isinstance(state, StoredSlots):
            return inner.update(gradients, state, params, **extra)
        wide = jax.tree.map(_widen_slot, state.inner, is_leaf=_is_own)
        updates, after = inner.update(gradients, wide, params, **extra)
        leaves, structure = jax.tree.flatten(after, is_leaf=_is_own)
        before = jax.tree.leaves(state.inner, is_leaf=_is_own)
        stored = [
            _round(new, old, state.count, number)
            for number, (new, old) in enumerate(zip(leaves, before, strict=True))
        ]
        return updates, StoredSlots(structure.unflatten(stored), state.count + 1)

    return optax.GradientTransformationExtraArgs(
        init,
        update,  # pyright: ignore[reportArgumentType] - optax's type is for any state
    )


def scale_loss_unless_scaled(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `optimizer` in `loss_scaling`, unless it has a loss scale of its own."""
    own = optax.with_extra_args_support(optimizer)
    scaled = loss_scaling(optimizer)

    def chosen(params: Tree | None) -> optax.GradientTransformationExtraArgs:
        state = jax.eval_shape(own.init, params)
        return scaled if loss_scale(state) is None else own

    def init(params: Tree) -> Tree:
        return chosen(params).init(params)

    def update(gradients: Tree, state: Tree, params: Tree | None = None, **extra: Any):
        return chosen(params).update(gradients, state, params, **extra)

    return optax.GradientTransformationExtraArgs(
        init,
        update,  # pyright: ignore[reportArgumentType] - optax names the arguments differently
    )


def keeps_small_updates(optimizer: optax.GradientTransformation, params: Tree) -> bool:
    """True if updates below the resolution of narrow parameters are not lost.

    They are kept in a slot of what rounding removed, or by random rounding.
    """
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params
    )
    state = jax.eval_shape(optimizer.init, shapes)
    if any(REMAINDER in node.slots for node in nodes_of(state, OptimizerState)):
        return True
    try:
        traced = jax.make_jaxpr(optimizer.update)(shapes, state, shapes)
    except Exception:  # noqa: BLE001 - it needs more arguments, so nothing is known about it
        return True
    draws = (random_bits_p, threefry2x32_p)
    return any(equation.primitive in draws for equation in equations_of(traced.jaxpr))


def _is_own(node: Any) -> bool:
    return isinstance(node, OptimizerState)


def _leaves_of_others(state: Tree) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=_is_own) if not _is_own(leaf)]


def _is_slot(leaf: Any) -> bool:
    """True for a floating-point array; scalars, such as a learning rate, are no slots."""
    return jnp.ndim(leaf) > 0 and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _widen_slot(node: Any) -> Any:
    return node if _is_own(node) or not _is_slot(node) else widen(node)


def _round(new: Any, old: Any, count: jax.Array, number: int) -> Any:
    """Return a new slot in the dtype of the old one."""
    if _is_own(new) or not _is_slot(new) or new.dtype == old.dtype:
        return new
    key = noise_key(count, number) if is_narrow(old.dtype) else None
    return store(new, old.dtype, key)
