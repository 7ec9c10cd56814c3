"""Apply an elementwise rule to whole arrays, and to the rows of a table that a gradient lists."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp

from ftrain.gradients.rows import Rows, nowhere
from ftrain.optimizers.rounding import REMAINDER, Rounding, is_narrow, round_update, store
from ftrain.tree import wide_dtype

Slots = Mapping[str, jax.Array]

ROWS_AT_ONCE = 2048  # fits the caches of a CPU


class Rule(Protocol):
    """One elementwise algorithm: from a gradient to the update of its parameter, and new slots.

    `rate` is the learning rate, `count` the number of updates applied before this one. All numbers
    are float32 or wider, whatever dtype parameters and slots are stored in.
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
class Masked:
    """The gradient of a vector of which only some elements have one."""

    values: jax.Array
    mask: jax.Array


Gradient = jax.Array | Rows | Masked | None
Update = jax.Array | Rows | None


@dataclasses.dataclass(frozen=True)
class RuleUpdate:
    """A rule at one update: its numbers for one array, and how results are rounded.

    Rate and weight decay are scalars, or vectors for a vector of several parameters.
    """

    rule: Rule
    rate: jax.Array
    weight_decay: jax.typing.ArrayLike | None
    count: jax.Array
    rounding: Rounding
    noise: Callable[[], jax.Array]  # makes a random key for one array; called only where needed

    def __call__(
        self, gradient: Gradient, parameter: jax.Array, slots: Slots
    ) -> tuple[Update, Slots]:
        """Return the update of one leaf, in the parameter's dtype, and its new slots, in theirs."""
        if gradient is None:
            return None, slots
        if isinstance(gradient, Masked):
            return self._apply_masked(gradient, parameter, slots)
        if isinstance(gradient, Rows):
            return self._apply_to_rows(gradient, parameter, slots)
        return self._apply(gradient, parameter, slots)

    def _apply(
        self,
        gradient: jax.Array,
        parameter: jax.Array,
        slots: Slots,
        part: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Compute in float32 or wider; round the update and the slots once, at the end."""
        wide = wide_dtype(parameter.dtype, *(slot.dtype for slot in slots.values()))
        before = {name: slot.astype(wide) for name, slot in slots.items()}
        exact = parameter.astype(wide)
        if REMAINDER in before:
            exact += before.pop(REMAINDER)
        gradient = jnp.asarray(gradient, wide)
        rate = self.rate.astype(wide)
        update, after = self.rule(gradient, exact, before, rate=rate, count=self.count)
        if self.weight_decay is not None:
            update -= rate * jnp.asarray(self.weight_decay, wide) * exact
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
        """A random key for every array rounded stochastically; different in each part of rows."""
        names = [name for name, slot in slots.items() if is_narrow(slot.dtype)]
        if is_narrow(parameter.dtype) and self.rounding == "stochastic":
            names.append("parameter")
        if not names:
            return {}
        key = self.noise() if part is None else jax.random.fold_in(self.noise(), part)
        return dict(zip(names, jax.random.split(key, len(names)), strict=True))

    def _apply_to_rows(
        self, gradient: Rows, parameter: jax.Array, slots: Slots
    ) -> tuple[Rows, Slots]:
        """Read and write only the rows that the gradient lists, and their slots.

        On a CPU a long list is processed in parts that fit its caches, up to the last row in the
        table.
        """
        rows = gradient.sum_duplicates(parameter)
        count = rows.indices.shape[0]
        if count <= ROWS_AT_ONCE or jax.default_backend() != "cpu":
            update, slots = self._apply_to_part(rows, parameter, slots)
            return rows.map(lambda _: update), slots
        padded = _pad(rows, -count % ROWS_AT_ONCE)
        positions = jnp.arange(1, padded.indices.shape[0] + 1)
        end = jnp.max(jnp.where(padded.is_within(parameter), positions, 0))

        def process_part(
            carry: tuple[jax.Array, jax.Array, Slots],
        ) -> tuple[jax.Array, jax.Array, Slots]:
            start, updates, slots = carry
            part = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, ROWS_AT_ONCE), padded
            )
            update, slots = self._apply_to_part(part, parameter, slots, start)
            updates = jax.lax.dynamic_update_slice_in_dim(updates, update, start, 0)
            return start + ROWS_AT_ONCE, updates, slots

        zeros = jnp.zeros(padded.values.shape, parameter.dtype)
        start = (jnp.int32(0), zeros, dict(slots))
        _, updates, slots = jax.lax.while_loop(lambda carry: carry[0] < end, process_part, start)
        return rows.map(lambda _: updates[:count]), slots

    def _apply_to_part(
        self, rows: Rows, parameter: jax.Array, slots: Slots, part: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the update of a list of rows, and the slots of the whole table after it."""
        own = {name: rows.take_from(slot) for name, slot in slots.items()}
        update, new = self._apply(rows.values, rows.take_from(parameter), own, part)
        within = rows.is_within(parameter).reshape(-1, *[1] * (update.ndim - 1))
        update = jnp.where(within, update, 0)  # an index outside of the table must not add to norms
        return update, {name: rows.put_into(slots[name], new[name]) for name in slots}

    def _apply_masked(
        self, gradient: Masked, parameter: jax.Array, slots: Slots
    ) -> tuple[jax.Array, Slots]:
        """Elements without a gradient keep their values and their slots."""
        update, new = self._apply(gradient.values, parameter, slots)
        kept = {name: jnp.where(gradient.mask, new[name], slots[name]) for name in slots}
        return jnp.where(gradient.mask, update, 0), kept


def _pad(rows: Rows, more: int) -> Rows:
    """Return `rows` with `more` entries at the end that name no row."""
    values = jnp.pad(rows.values, [(0, more)] + [(0, 0)] * (rows.values.ndim - 1))
    # Indices that `rows` do not use for their own entries that name no row.
    indices = nowhere(rows.indices.shape[0] + more, rows.indices.dtype)[rows.indices.shape[0] :]
    return Rows(jnp.concatenate([rows.indices, indices]), values, rows.unique)
