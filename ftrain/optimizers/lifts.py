"""The two lifts of an elementwise rule: to whole arrays, and to the rows of a table that a gradient names."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ftrain.gradients.rows import Rows, nowhere

Slots = Mapping[str, jax.Array]

ROWS_AT_ONCE = 2048


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
    update, new_slots = rule(jnp.asarray(gradient, dtype), parameter.astype(dtype), slots)
    return update.astype(parameter.dtype), new_slots


def on_rows(rule: BoundRule, dtype: Any, gradient: Rows, parameter: jax.Array, slots: Slots):
    """The lift to rows: those that the gradient names, and their slots, are read and written, no others.

    On a CPU a long list of rows is worked off in parts that fit its caches, as far as rows are named.
    """
    rows = gradient.sum_duplicates(parameter)
    count = rows.indices.shape[0]
    if count <= ROWS_AT_ONCE or jax.default_backend() != "cpu":
        update, slots = _on_some_rows(rule, dtype, rows, parameter, slots)
        return rows.map(lambda _: update), slots
    padded = _pad(rows, -count % ROWS_AT_ONCE)
    named = jnp.max(jnp.where(padded.is_within(parameter), jnp.arange(1, padded.indices.shape[0] + 1), 0))

    def work_off(carry: tuple[jax.Array, jax.Array, Slots]) -> tuple[jax.Array, jax.Array, Slots]:
        start, updates, slots = carry
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, ROWS_AT_ONCE), padded)
        update, slots = _on_some_rows(rule, dtype, part, parameter, slots)
        return start + ROWS_AT_ONCE, jax.lax.dynamic_update_slice_in_dim(updates, update, start, 0), slots

    zeros = jnp.zeros(padded.values.shape, parameter.dtype)
    _, updates, slots = jax.lax.while_loop(lambda carry: carry[0] < named, work_off, (jnp.int32(0), zeros, dict(slots)))
    return rows.map(lambda _: updates[:count]), slots


def _on_some_rows(rule: BoundRule, dtype: Any, rows: Rows, parameter: jax.Array, slots: Slots):
    near = {name: rows.take_from(slot) for name, slot in slots.items()}
    update, new = on_array(rule, dtype, rows.values, rows.take_from(parameter), near)
    within = rows.is_within(parameter).reshape(-1, *[1] * (update.ndim - 1))
    update = jnp.where(within, update, 0)  # a place that names no row is not counted in norms
    return update, {name: rows.put_into(slots[name], new[name]) for name in slots}


def _pad(rows: Rows, more: int) -> Rows:
    """`rows` with places at the end that name no row."""
    values = jnp.pad(rows.values, [(0, more)] + [(0, 0)] * (rows.values.ndim - 1))
    # Numbers that the rows themselves do not use for their own places that name no row.
    indices = nowhere(rows.indices.shape[0] + more, rows.indices.dtype)[rows.indices.shape[0] :]
    return Rows(jnp.concatenate([rows.indices, indices]), values, rows.unique)


def on_masked(rule: BoundRule, dtype: Any, gradient: Masked, parameter: jax.Array, slots: Slots):
    """The lift to a vector of small parameters of which some have no gradient: those stay, and their slots."""
    update, new = on_array(rule, dtype, gradient.values, parameter, slots)
    kept = {name: jnp.where(gradient.mask, new[name], slots[name]) for name in slots}
    return jnp.where(gradient.mask, update, 0), kept
