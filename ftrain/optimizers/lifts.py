"""The two lifts of an elementwise rule: to whole arrays, and to the rows of a table that a gradient names."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ftrain.gradients.rows import Rows

Slots = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Masked:
    """The gradient of a vector in which only some numbers have one."""

    values: jax.Array
    mask: jax.Array


Gradient = jax.Array | Rows | Masked | None

# A rule that knows its learning rate and count: (gradient, parameter, slots) -> (update, new slots)
BoundRule = Callable[[jax.Array, jax.Array, Slots], tuple[jax.Array, Slots]]


def lift(rule: BoundRule, dtype: Any, gradient: Gradient, parameter: jax.Array, slots: Slots):
    """The update of one leaf and its new slots, the rule computed in `dtype`."""
    if gradient is None:
        return None, slots
    if isinstance(gradient, Masked):
        return on_masked(rule, dtype, gradient, parameter, slots)
    if isinstance(gradient, Rows):
        return on_rows(rule, dtype, gradient, parameter, slots)
    return on_array(rule, dtype, gradient, parameter, slots)


def on_array(rule: BoundRule, dtype: Any, gradient: jax.Array, parameter: jax.Array, slots: Slots):
    """The lift to a whole array; the update has the parameter's own dtype."""
    update, new_slots = rule(gradient.astype(dtype), parameter.astype(dtype), slots)
    return update.astype(parameter.dtype), new_slots


def on_rows(rule: BoundRule, dtype: Any, gradient: Rows, parameter: jax.Array, slots: Slots):
    """The lift to rows: those that the gradient names, and their slots, are read and written, no others."""
    rows = gradient.sum_duplicates()
    near = {name: rows.take_from(slot) for name, slot in slots.items()}
    update, new = on_array(rule, dtype, rows.values, rows.take_from(parameter), near)
    update = jnp.where(rows.is_within(parameter), update, 0)  # a place that names no row is not counted in norms
    return rows.map(lambda _: update), {name: rows.put_into(slots[name], new[name]) for name in slots}


def on_masked(rule: BoundRule, dtype: Any, gradient: Masked, parameter: jax.Array, slots: Slots):
    """The lift to a vector of small parameters of which some have no gradient: those stay, and their slots."""
    update, new = on_array(rule, dtype, gradient.values, parameter, slots)
    kept = {name: jnp.where(gradient.mask, new[name], slots[name]) for name in slots}
    return jnp.where(gradient.mask, update, 0), kept
