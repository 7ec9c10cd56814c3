"""Slots: what an optimizer keeps for each parameter, listed and read by name."""

import jax

from ftrain.optimizers.rule import OptimizerState
from ftrain.packed import unpack
from ftrain.tree import Tree, named_leaves, nodes_of


def slot_names(opt_state: Tree) -> list[str]:
    """The names of all slots in an optimizer's state, wherever in a chain they are kept."""
    return sorted({name for state in nodes_of(opt_state, OptimizerState) for name in state.slots})


def get_slot(opt_state: Tree, parameter: str, slot: str) -> jax.Array:
    """The slot of a parameter, both by name: `get_slot(opt_state, "dense/kernel", "m")`."""
    if slot not in slot_names(opt_state):
        raise KeyError(
            f"there is no slot {slot}; there are {', '.join(slot_names(opt_state)) or 'none'}"
        )
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
