"""Packing for optimizers: slots, gradients and updates of many small parameters as one vector for each dtype."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ftrain.gradients.rows import Rows
from ftrain.optimizers.lifts import Gradient, Masked
from ftrain.optimizers.rounding import is_narrow, widened
from ftrain.packed import Layout, Packed, is_concrete, join
from ftrain.tree import Tree, leaves_like, leaves_with_names


def fill(layout: Layout, params: Tree, value: float, dtype: Any) -> Tree:
    """A slot that holds `value` everywhere: in `dtype`, or each parameter's own if that is float32 or wider."""
    return _fill(layout, params, value, dtype, only_narrow=False)


def fill_narrow(layout: Layout, params: Tree, value: float, dtype: Any) -> Tree:
    """The same for parameters narrower than float32 alone; the others have None in their places."""
    return _fill(layout, params, value, dtype, only_narrow=True)


def _fill(layout: Layout, params: Tree, value: float, dtype: Any, *, only_narrow: bool) -> Tree:
    leaves = jax.tree.leaves(params)

    def has_slot(own: Any) -> bool:
        return is_narrow(own) or not only_narrow

    apart = [
        jnp.full_like(leaf, value, dtype=dtype or widened(jnp.result_type(leaf)))
        if has_slot(jnp.result_type(leaf))
        else None
        for leaf in layout.apart(leaves)
    ]
    vectors = []
    for group in layout.groups():
        first = leaves[layout.members(group)[0]]
        where = first.sharding if is_concrete(first) else None
        vector = jnp.full(layout.length(group), value, dtype or widened(group), device=where)
        vectors.append(vector if has_slot(group) else None)
    return layout.store(apart + vectors)


def layout_of(slots: dict[str, Tree], params: Tree) -> Layout:
    """The layout that the slots of parameters are stored in, or an error if they are those of others."""
    structure = jax.tree.structure(params)
    for slot in slots.values():
        stored = (
            slot.layout.structure.unflatten(slot.layout.places)
            if isinstance(slot, Packed)
            else slot
        )
        places = leaves_like(stored, params, "slots", is_leaf=lambda node: node is None)
        for place, (name, leaf) in zip(places, leaves_with_names(params), strict=True):
            if place is not None and place.shape != jnp.shape(leaf):
                wrong = f"slot has shape {place.shape}, parameter {jnp.shape(leaf)}"
                raise ValueError(
                    f"slots and parameters differ at {name}: {wrong}; init(params) makes a new state"
                )
        if isinstance(slot, Packed):
            return slot.layout
    return Layout(structure, (None,) * structure.num_leaves)


def join_gradients(
    layout: Layout, gradients: Sequence[Gradient], leaves: Sequence[jax.Array]
) -> list[Gradient]:
    """Gradients as the layout stores their parameters: what has none in a vector is masked there."""
    joined = layout.apart(gradients)
    for group in layout.groups():
        own = [(gradients[n], leaves[n]) for n in layout.members(group)]
        vector = join(
            [jnp.asarray(_whole(gradient, leaf), widened(group)) for gradient, leaf in own]
        )
        is_full = not any(gradient is None or isinstance(gradient, Rows) for gradient, _ in own)
        joined.append(
            vector
            if is_full
            else Masked(vector, join([_mask(gradient, leaf) for gradient, leaf in own]))
        )
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
