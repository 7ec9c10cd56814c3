"""Packing for optimizers: slots, gradients and updates of many small parameters as one vector for each dtype."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ftrain.gradients.rows import Rows
from ftrain.optimizers.lifts import Gradient, Masked
from ftrain.packed import Layout, Packed, is_concrete, join
from ftrain.tree import Tree


def fill(layout: Layout, params: Tree, value: float, dtype: Any) -> Tree:
    """A slot that holds `value` everywhere, in the parameters' places and, without a `dtype`, in theirs."""
    leaves = jax.tree.leaves(params)
    where = leaves[0].sharding if leaves and is_concrete(leaves[0]) else None
    vectors = [jnp.full(layout.length(group), value, dtype or group, device=where) for group in layout.groups()]
    return layout.store([jnp.full_like(leaf, value, dtype=dtype) for leaf in layout.apart(leaves)] + vectors)


def layout_of(slots: dict[str, Tree], structure: Any) -> Layout:
    """The layout that the slots of parameters are stored in."""
    for slot in slots.values():
        if isinstance(slot, Packed):
            return slot.layout
    return Layout(structure, (None,) * structure.num_leaves)


def join_gradients(layout: Layout, gradients: Sequence[Gradient], leaves: Sequence[jax.Array]) -> list[Gradient]:
    """Gradients as the layout stores their parameters: what has none in a vector is masked there."""
    joined = layout.apart(gradients)
    for group in layout.groups():
        own = [(gradients[n], leaves[n]) for n in layout.members(group)]
        vector = join([_whole(gradient, leaf) for gradient, leaf in own])
        is_full = not any(gradient is None or isinstance(gradient, Rows) for gradient, _ in own)
        joined.append(vector if is_full else Masked(vector, join([_mask(gradient, leaf) for gradient, leaf in own])))
    return joined


def split_updates(layout: Layout, updates: list[Any], gradients: Sequence[Gradient]) -> list[Any]:
    """The update of each parameter; None for one that has no gradient."""
    pairs = zip(layout.split(updates), gradients, strict=True)
    return [None if gradient is None else update for update, gradient in pairs]


def _whole(gradient: Gradient, parameter: jax.Array) -> Any:
    if gradient is None:
        return jnp.zeros_like(parameter)
    return gradient.to_dense(parameter) if isinstance(gradient, Rows) else gradient


def _mask(gradient: Gradient, parameter: jax.Array) -> jax.Array:
    """Where a parameter has a gradient."""
    if isinstance(gradient, Rows):
        named = jnp.zeros(parameter.shape, bool)
        return gradient.put_into(named, jnp.ones(gradient.values.shape, bool))
    return jnp.full(parameter.shape, gradient is not None)
