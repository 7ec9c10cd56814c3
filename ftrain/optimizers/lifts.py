"""Applying an elementwise rule: to whole arrays, and to the rows of a table that a gradient names."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ftrain.gradients.rows import Rows, nowhere
from ftrain.optimizers.rounding import REMAINDER, Rounding, is_narrow, round_update, store, widened

Slots = Mapping[str, jax.Array]

ROWS_AT_ONCE = 2048


@dataclasses.dataclass(frozen=True)
class Masked:
    """The gradient of a vector in which only some numbers have one."""

    values: jax.Array
    mask: jax.Array


Gradient = jax.Array | Rows | Masked | None


class Rule(Protocol):
    """One elementwise algorithm: what becomes of parameters whose gradient this is.

    `rate` is the learning rate, `count` the number of updates applied before this one. All numbers are float32 at
    least, whatever the parameters and slots are kept in.
    """

    def __call__(
        self,
        gradient: jax.Array,
        parameter: jax.Array,
        slots: Slots,
        rate: jax.Array,
        count: jax.Array,
    ) -> tuple[jax.Array, Slots]: ...


@dataclasses.dataclass(frozen=True)
class Application:
    """A rule at one update: its learning rate and count, and how results are rounded."""

    rule: Rule
    rate: jax.Array
    count: jax.Array
    rounding: Rounding
    noise: Callable[
        [], jax.Array
    ]  # a key of random numbers for one array, made only where something is rounded

    def __call__(self, gradient: Gradient, parameter: jax.Array, slots: Slots) -> tuple[Any, Slots]:
        """The update of one leaf, in the parameter's dtype, and its new slots, in theirs."""
        if gradient is None:
            return None, slots
        if isinstance(gradient, Masked):
            return self._on_masked(gradient, parameter, slots)
        if isinstance(gradient, Rows):
            return self._on_rows(gradient, parameter, slots)
        return self._on_array(gradient, parameter, slots)

    def _on_array(
        self, gradient: jax.Array, parameter: jax.Array, slots: Slots, part: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Compute in float32 at least; round the update and the slots once, at the end."""
        wide = widened(jnp.result_type(parameter.dtype, *(slot.dtype for slot in slots.values())))
        before = {name: slot.astype(wide) for name, slot in slots.items()}
        exact = parameter.astype(wide)
        if REMAINDER in before:
            exact += before.pop(REMAINDER)
        gradient = jnp.asarray(gradient, wide)
        update, after = self.rule(
            gradient, exact, before, rate=self.rate.astype(wide), count=self.count
        )
        after = dict(after)
        keys = self._keys(parameter, slots, part)
        if is_narrow(parameter.dtype):
            update, remainder = round_update(
                parameter, exact + update, self.rounding, keys.get("parameter")
            )
            if REMAINDER in slots:
                after[REMAINDER] = remainder
        stored = {
            name: store(after[name], slot.dtype, keys.get(name)) for name, slot in slots.items()
        }
        return update.astype(parameter.dtype), stored

    def _keys(
        self, parameter: jax.Array, slots: Slots, part: jax.Array | None
    ) -> dict[str, jax.Array]:
        """A key for everything that is rounded at random; rows worked off in parts have other keys in each."""
        names = [name for name, slot in slots.items() if is_narrow(slot.dtype)]
        if is_narrow(parameter.dtype) and self.rounding == "stochastic":
            names.append("parameter")
        if not names:
            return {}
        key = self.noise() if part is None else jax.random.fold_in(self.noise(), part)
        return dict(zip(names, jax.random.split(key, len(names)), strict=True))

    def _on_rows(self, gradient: Rows, parameter: jax.Array, slots: Slots) -> tuple[Rows, Slots]:
        """Read and write the rows that the gradient names, and their slots, no others.

        On a CPU a long list of rows is worked off in parts that fit its caches, as far as rows are named.
        """
        rows = gradient.sum_duplicates(parameter)
        count = rows.indices.shape[0]
        if count <= ROWS_AT_ONCE or jax.default_backend() != "cpu":
            update, slots = self._on_some_rows(rows, parameter, slots)
            return rows.map(lambda _: update), slots
        padded = _pad(rows, -count % ROWS_AT_ONCE)
        named = jnp.max(
            jnp.where(padded.is_within(parameter), jnp.arange(1, padded.indices.shape[0] + 1), 0)
        )

        def work_off(
            carry: tuple[jax.Array, jax.Array, Slots],
        ) -> tuple[jax.Array, jax.Array, Slots]:
            start, updates, slots = carry
            part = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, ROWS_AT_ONCE), padded
            )
            update, slots = self._on_some_rows(part, parameter, slots, start)
            return (
                start + ROWS_AT_ONCE,
                jax.lax.dynamic_update_slice_in_dim(updates, update, start, 0),
                slots,
            )

        zeros = jnp.zeros(padded.values.shape, parameter.dtype)
        start = (jnp.int32(0), zeros, dict(slots))
        _, updates, slots = jax.lax.while_loop(lambda carry: carry[0] < named, work_off, start)
        return rows.map(lambda _: updates[:count]), slots

    def _on_some_rows(
        self, rows: Rows, parameter: jax.Array, slots: Slots, part: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        near = {name: rows.take_from(slot) for name, slot in slots.items()}
        update, new = self._on_array(rows.values, rows.take_from(parameter), near, part)
        within = rows.is_within(parameter).reshape(-1, *[1] * (update.ndim - 1))
        update = jnp.where(within, update, 0)  # a place that names no row is not counted in norms
        return update, {name: rows.put_into(slots[name], new[name]) for name in slots}

    def _on_masked(
        self, gradient: Masked, parameter: jax.Array, slots: Slots
    ) -> tuple[jax.Array, Slots]:
        """A vector of small parameters of which some have no gradient: those stay, and their slots."""
        update, new = self._on_array(gradient.values, parameter, slots)
        kept = {name: jnp.where(gradient.mask, new[name], slots[name]) for name in slots}
        return jnp.where(gradient.mask, update, 0), kept


def _pad(rows: Rows, more: int) -> Rows:
    """`rows` with places at the end that name no row."""
    values = jnp.pad(rows.values, [(0, more)] + [(0, 0)] * (rows.values.ndim - 1))
    # Numbers that the rows themselves do not use for their own places that name no row.
    indices = nowhere(rows.indices.shape[0] + more, rows.indices.dtype)[rows.indices.shape[0] :]
    return Rows(jnp.concatenate([rows.indices, indices]), values, rows.unique)
