"""From one elementwise rule to an optax transform: what every optimizer shares."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from ftrain.gradients.rows import Rows, to_dense
from ftrain.optimizers.checks import (
    check_dtype,
    check_learning_rate,
    check_parameters,
    check_real,
    leaves_of_gradients,
)
from ftrain.optimizers.lifts import Gradient, Slots, lift
from ftrain.optimizers.packing import fill, join_gradients, layout_of, split_updates
from ftrain.packed import plan
from ftrain.schedules import Schedule
from ftrain.tree import Tree

LearningRate = float | jax.Array | Schedule


class Rule(Protocol):
    """One elementwise algorithm: what becomes of parameters whose gradient this is.

    `rate` is the learning rate, `count` the number of updates applied before this one.
    """

    def __call__(
        self, gradient: jax.Array, parameter: jax.Array, slots: Slots, rate: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, Slots]: ...


class OptimizerState(NamedTuple):
    count: jax.Array  # updates applied so far  # pyright: ignore[reportIncompatibleMethodOverride] - optax's name
    learning_rate: jax.Array  # of the newest update, for metrics to show
    slots: dict[str, Tree]  # by slot name, each shaped like the parameters, or packed


def from_rule(
    rule: Rule,
    learning_rate: LearningRate,
    slots: Mapping[str, float] | None = None,
    *,
    slot_dtype: jax.typing.DTypeLike | None = None,
    packed: bool | None = None,
    lazy: bool = True,
) -> optax.GradientTransformation:
    """An optax transform that applies `rule` to every leaf, and to the rows that `Rows` name.

    A leaf whose gradient is None stays as it is, and so do its slots.

    Args:
      slots: what the rule keeps for each parameter, with the value it starts from.
      slot_dtype: the type of the slots and of the arithmetic, such as float32 for bfloat16 parameters; without it,
        each parameter's own.
      packed: whether the slots of many parameters are kept and updated in one vector for each dtype, which costs less
        time for a thousand small ones. By default so are those of parameters with few elements, if there are several.
        The numbers are the same, `get_slot` finds them by name, and checkpoints name every one; but functions that look
        for trees like the parameters in the state, such as `optax.tree.map_params`, need `packed=False`.
      lazy: whether rows that `Rows` do not name are left alone. Otherwise they have a gradient of zero.
    """
    slots = dict(slots or {})
    check_learning_rate(learning_rate)
    check_dtype(slot_dtype=slot_dtype)

    def rate(count: jax.Array) -> jax.Array:
        return jnp.asarray(learning_rate(count) if callable(learning_rate) else learning_rate)

    def init(params: Tree) -> OptimizerState:
        check_parameters(params)
        check_real(params)
        layout = plan(params, packed)
        count = jnp.zeros((), jnp.int32)
        filled = {name: fill(layout, params, value, slot_dtype) for name, value in slots.items()}
        # A copy: a learning rate that is an array must not be given away with the state.
        return OptimizerState(count, jnp.array(rate(count), jnp.float32), filled)

    def update(gradients: Tree, state: OptimizerState, params: Tree | None = None):
        if params is None:
            raise ValueError("this optimizer needs the parameters: call update(gradients, state, params)")
        _check_state(state, slots)
        given = leaves_of_gradients(gradients, params)
        leaves, structure = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)], jax.tree.structure(params)
        if not lazy:
            given = jax.tree.leaves(to_dense(given, leaves), is_leaf=lambda node: node is None)
        layout = layout_of(state.slots, params)
        now = rate(state.count)

        def one(gradient: Gradient, parameter: jax.Array, *values: jax.Array):
            dtype = jnp.dtype(slot_dtype or parameter.dtype)
            bound = functools.partial(rule, rate=now.astype(dtype), count=state.count)
            return lift(bound, dtype, gradient, parameter, dict(zip(slots, values, strict=True)))

        columns = [layout.arrays(state.slots[name]) for name in slots]
        rows = zip(join_gradients(layout, given, leaves, slot_dtype), layout.join(leaves), *columns, strict=True)
        results = [one(*row) for row in rows]
        updates = structure.unflatten(split_updates(layout, [update for update, _ in results], given))
        new_slots = {name: layout.store([kept[name] for _, kept in results]) for name in slots}
        return updates, OptimizerState(state.count + 1, now.astype(jnp.float32), new_slots)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType] - optax types params narrower


def _check_state(state: Any, slots: Mapping[str, float]) -> None:
    if not isinstance(state, OptimizerState) or set(state.slots) != set(slots):
        found = ", ".join(state.slots) if isinstance(state, OptimizerState) else type(state).__name__
        wanted = ", ".join(slots) or "none"
        raise ValueError(
            f"the state is not one of this optimizer, whose slots are {wanted}: got {found or 'no slots'}; "
            "init(params) starts anew"
        )


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Parameters plus updates, each leaf in its own dtype.

    `Rows` are added to the rows they name, and where there is no update, None, a parameter stays.
    """

    def add(parameter: jax.Array, update: jax.Array | Rows | None) -> jax.Array:
        if update is None:
            return parameter
        return update.add_to(parameter) if isinstance(update, Rows) else (parameter + update).astype(parameter.dtype)

    given = leaves_of_gradients(updates, params, "updates")
    added = [add(jnp.asarray(leaf), update) for leaf, update in zip(jax.tree.leaves(params), given, strict=True)]
    return jax.tree.structure(params).unflatten(added)


def current_learning_rate(opt_state: Tree) -> jax.Array | None:
    """The rate of the newest update, found in any optimizer state that shows one.

    ftrain's optimizers and `optax.inject_hyperparams` do; plain optax closes over its rate and shows none.
    """
    shown = optax.tree.get_all_with_path(opt_state, "learning_rate", _is_rate)
    return jnp.asarray(shown[0][1], jnp.float32) if shown else None


def _is_rate(path: tuple[Any, ...], value: Any) -> bool:
    # A parameter may carry the same name inside a slot tree; a rate is a scalar outside of them.
    return jnp.ndim(value) == 0 and not any(getattr(key, "name", None) == "slots" for key in path)
