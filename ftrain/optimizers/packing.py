"""Packing for optimizers: slots, gradients and updates of many small parameters as one vector for each dtype."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ftrain.gradients.rows import Rows
from ftrain.optimizers.lifts import Gradient, Masked
from ftrain.packed import Layout, Packed, is_concrete, join
from ftrain.tree import Tree, leaves_like, leaves_with_names


def fill(layout: Layout, params: Tree, value: float, dtype: Any) -> Tree:
    """A slot that holds `value` everywhere, in the parameters' places and, without a `dtype`, in theirs."""
    leaves = jax.tree.leaves(params)
    apart = [jnp.full_like(leaf, value, dtype=dtype) for leaf in layout.apart(leaves)]
    vectors = []
    for group in layout.groups():
        first = leaves[layout.members(group)[0]]
        where = first.sharding if is_concrete(first) else None
        vectors.append(jnp.full(layout.length(group), value, dtype or group, device=where))
    return layout.store(apart + vectors)


def layout_of(slots: dict[str, Tree], params: Tree) -> Layout:
    """The layout that the slots of parameters are stored in, or an error if they are those of others."""
    structure = jax.tree.structure(params)
    for slot in slots.values():
        stored = slot.layout.structure.unflatten(slot.layout.places) if isinstance(slot, Packed) else slot
        places = leaves_like(stored, params, "slots", is_leaf=lambda node: node is None)
        for place, (name, leaf) in zip(places, leaves_with_names(params), strict=True):
            if place is not None and place.shape != jnp.shape(leaf):
                wrong = f"slot has shape {place.shape}, parameter {jnp.shape(leaf)}"
                raise ValueError(f"slots and parameters differ at {name}: {wrong}; init(params) starts anew")
        if isinstance(slot, Packed):
            return slot.layout
    return Layout(structure, (None,) * structure.num_leaves)


def join_gradients(
    layout: Layout, gradients: Sequence[Gradient], leaves: Sequence[jax.Array], dtype: Any
) -> list[Gradient]:
    """Gradients as the layout stores their parameters: what has none in a vector is masked there.

    Those of a vector are in `dtype`, or else in the parameters'.
    """
    joined = layout.apart(gradients)
    for group in layout.groups():
        own = [(gradients[n], leaves[n]) for n in layout.members(group)]
        vector = join([jnp.asarray(_whole(gradient, leaf), dtype or group) for gradient, leaf in own])
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
