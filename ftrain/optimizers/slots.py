"""Slots: what an optimizer keeps for each parameter, packed in vectors for many small ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ftrain.gradients.rows import Rows
from ftrain.optimizers.apply_rule import Gradient, Masked, Update
from ftrain.optimizers.rounding import is_narrow
from ftrain.packed import Layout, Packed, is_concrete, join, unpack
from ftrain.tree import Tree, leaves_like, leaves_with_names, named_leaves, nodes_of, wide_dtype


class OptimizerState(NamedTuple):
    """The state of every optimizer that `from_rule` makes."""

    # Updates applied so far, named as in optax, although tuples have a method `count`.
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] - optax's name
    learning_rate: jax.Array  # of the newest update, for metrics
    slots: dict[str, Tree]  # by slot name, each shaped like the parameters, or packed


def slot_names(opt_state: Tree) -> list[str]:
    """Return the names of all slots in an optimizer's state, wherever in a chain they are."""
    return sorted({name for state in nodes_of(opt_state, OptimizerState) for name in state.slots})


def get_slot(opt_state: Tree, parameter: str, slot: str) -> jax.Array:
    """Return the slot of a parameter, both by name: `get_slot(opt_state, "dense/kernel", "m")`."""
    if slot not in slot_names(opt_state):
        known = ", ".join(slot_names(opt_state)) or "none"
        raise KeyError(f"there is no slot {slot}; the slots are: {known}")
    found = [
        named_leaves(unpack(state.slots[slot]))
        for state in nodes_of(opt_state, OptimizerState)
        if slot in state.slots
    ]
    for leaves in found:
        if parameter in leaves:
            return leaves[parameter]
    known = sorted({name for leaves in found for name in leaves})
    raise KeyError(f"no parameter {parameter} has a slot {slot}; these have: {', '.join(known)}")


def fill(
    layout: Layout,
    params: Tree,
    value: float,
    dtype: DTypeLike | None,
    *,
    only_narrow: bool = False,
) -> Tree:
    """Return a slot that holds `value` everywhere.

    Args:
      dtype: of the slot; by default each parameter's own, and float32 for narrower ones.
      only_narrow: only parameters narrower than float32 have the slot; the others have None.
    """
    leaves = jax.tree.leaves(params)

    def has_slot(own: DTypeLike) -> bool:
        return is_narrow(own) or not only_narrow

    apart = [
        jnp.full_like(leaf, value, dtype=dtype or wide_dtype(leaf))
        if has_slot(jnp.result_type(leaf))
        else None
        for leaf in layout.apart(leaves)
    ]
    vectors = []
    for group in layout.groups():
        first = leaves[layout.members(group)[0]]
        where = first.sharding if is_concrete(first) else None
        vector = jnp.full(layout.length(group), value, dtype or wide_dtype(group), device=where)
        vectors.append(vector if has_slot(group) else None)
    return layout.store(apart + vectors)


def layout_of(slots: dict[str, Tree], params: Tree) -> Layout:
    """Return the layout of the slots; raise ValueError if they belong to other parameters."""
    structure = jax.tree.structure(params)
    for slot in slots.values():
        stored = slot
        if isinstance(slot, Packed):
            stored = slot.layout.structure.unflatten(slot.layout.places)
        places = leaves_like(stored, params, "slots", is_leaf=lambda node: node is None)
        for place, (name, leaf) in zip(places, leaves_with_names(params), strict=True):
            if place is not None and place.shape != jnp.shape(leaf):
                wrong = f"slot has shape {place.shape}, parameter {jnp.shape(leaf)}"
                raise ValueError(
                    f"slots and parameters differ at {name}: {wrong}; "
                    "init(params) makes a new state"
                )
        if isinstance(slot, Packed):
            return slot.layout
    return Layout(structure, (None,) * structure.num_leaves)


def join_gradients(
    layout: Layout, gradients: Sequence[jax.Array | Rows | None], leaves: Sequence[jax.Array]
) -> list[Gradient]:
    """Arrange gradients as the layout stores their parameters.

    A vector with parameters that have no gradient, or `Rows`, is masked.
    """
    joined = layout.apart(gradients)
    for group in layout.groups():
        own = [(gradients[n], leaves[n]) for n in layout.members(group)]
        dense = [
            jnp.asarray(_to_dense(gradient, leaf), wide_dtype(group)) for gradient, leaf in own
        ]
        vector = join(dense)
        if any(gradient is None or isinstance(gradient, Rows) for gradient, _ in own):
            vector = Masked(vector, join([_mask(gradient, leaf) for gradient, leaf in own]))
        joined.append(vector)
    return joined


def join_numbers(
    layout: Layout, numbers: Sequence[ArrayLike | None], leaves: Sequence[jax.Array]
) -> list[Any]:
    """Arrange a number for each parameter as the layout stores them; None is zero.

    The number of a vector is a scalar if its parameters share one, and else a vector.
    """
    joined = layout.apart(numbers)
    for group in layout.groups():
        members = layout.members(group)
        first = numbers[members[0]]
        if all(numbers[n] is first for n in members):
            joined.append(first)
            continue
        values = [0 if number is None else number for number in numbers]
        joined.append(join([jnp.full(leaves[n].shape, values[n], float) for n in members]))
    return joined


def split_updates(
    layout: Layout, updates: list[Update], gradients: Sequence[jax.Array | Rows | None]
) -> list[Update]:
    """Return the update of each parameter; None for one without a gradient."""
    pairs = zip(layout.split(updates), gradients, strict=True)
    return [None if gradient is None else update for update, gradient in pairs]


def _to_dense(gradient: jax.Array | Rows | None, parameter: jax.Array) -> jax.Array:
    if gradient is None:
        return jnp.zeros_like(parameter)
    return gradient.to_dense(parameter) if isinstance(gradient, Rows) else gradient


def _mask(gradient: jax.Array | Rows | None, parameter: jax.Array) -> jax.Array:
    """True where a parameter has a gradient."""
    if isinstance(gradient, Rows):
        named = jnp.zeros(parameter.shape, bool)
        return gradient.put_into(named, jnp.ones(gradient.values.shape, bool))
    return jnp.full(parameter.shape, gradient is not None)
