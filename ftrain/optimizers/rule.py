"""From one elementwise rule to an optax transform: what every optimizer shares."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ftrain.gradients.rows import Rows, to_dense
from ftrain.hyperparameters import check_not_negative
from ftrain.optimizers.apply_rule import Gradient, Rule, RuleUpdate, Slots
from ftrain.optimizers.checks import (
    check_dtype,
    check_learning_rate,
    check_parameters,
    check_real,
    leaves_of_gradients,
)
from ftrain.optimizers.parameter_group import (
    Group,
    GroupError,
    GroupsState,
    LeafGroups,
)
from ftrain.optimizers.rounding import REMAINDER, Rounding, check_rounding, is_narrow, noise_key
from ftrain.optimizers.slots import (
    OptimizerState,
    fill,
    join_gradients,
    join_numbers,
    layout_of,
    split_updates,
)
from ftrain.packed import plan
from ftrain.schedules import Scheduled, value_at
from ftrain.tree import Tree, leaves_with_names, nodes_of

__all__ = [
    "LearningRate",
    "Rounding",
    "Rule",
    "Slots",
    "apply_updates",
    "current_learning_rate",
    "from_rule",
]

LearningRate = Scheduled


def from_rule(
    rule: Rule,
    learning_rate: LearningRate,
    slots: Mapping[str, float] | None = None,
    *,
    slot_dtype: jax.typing.DTypeLike | None = None,
    packed: bool | None = None,
    lazy: bool = True,
    rounding: Rounding = "compensated",
    weight_decay: Scheduled | None = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Make an optax transform that applies `rule` to every leaf, and to the rows that `Rows` list.

    A leaf whose gradient is None keeps its value and its slots. The rule computes in float32 or
    wider, whatever dtype parameters, gradients and slots have. Updates have the dtype of their
    parameters.

    Args:
      slots: the slots that the rule keeps for each parameter, with their initial values.
      slot_dtype: the dtype of the slots. By default it is the parameter's own, and float32 for
        bfloat16 and float16 parameters. A dtype narrower than float32 saves memory. Such slots are
        rounded stochastically: rounded to nearest, a running mean would stop moving.
      packed: whether to keep and update the slots of many parameters in one vector for each dtype,
        which is faster for a thousand small ones. By default, parameters with few elements are
        packed, if there are several. The numbers are the same, `get_slot` finds slots by name, and
        checkpoints name every one. Functions that search the state for trees like the parameters,
        such as `optax.tree.map_params`, need `packed=False`.
      lazy: whether rows that `Rows` do not list keep their values and slots. Otherwise they are
        updated with a gradient of zero.
      rounding: how bfloat16 and float16 parameters take updates that are smaller than their
        resolution. It does not affect float32 parameters.
        "compensated" keeps what rounding removed in a slot named "remainder" and adds it later:
        parameter and remainder together follow the float32 trajectory, for 4 bytes a parameter.
        "stochastic" rounds up or down at random, correct on average, and needs no memory.
        "nearest" loses such updates: a parameter may stop moving.
      weight_decay: p -= lr * weight_decay * p, besides the update of the rule, as in AdamW; a
        number or a schedule of the number of updates. Rows that `Rows` do not list keep their
        values. None for a rule that must not be combined with it.
    """
    slots = dict(slots or {})
    if REMAINDER in slots:
        raise ValueError(
            f"a rule cannot have a slot named {REMAINDER!r}: it holds what rounding removed"
        )
    check_learning_rate(learning_rate)
    check_dtype(slot_dtype=slot_dtype)
    check_rounding(rounding)
    check_not_negative(weight_decay=weight_decay)

    def rate(count: jax.Array) -> jax.Array:
        return jnp.asarray(value_at(learning_rate, count))

    def names_of(params: Tree) -> list[str]:
        is_compensated = rounding == "compensated" and any(
            is_narrow(jnp.result_type(leaf)) for leaf in jax.tree.leaves(params)
        )
        return [*slots, REMAINDER] if is_compensated else [*slots]

    def init(params: Tree) -> OptimizerState:
        check_parameters(params)
        check_real(params)
        layout = plan(params, packed)
        count = jnp.zeros((), jnp.int32)
        filled = {name: fill(layout, params, value, slot_dtype) for name, value in slots.items()}
        if REMAINDER in names_of(params):
            filled[REMAINDER] = fill(layout, params, 0.0, slot_dtype, only_narrow=True)
        # A copy: a learning rate that is an array must not be donated with the state.
        return OptimizerState(count, jnp.array(rate(count), jnp.float32), filled)

    def update(
        gradients: Tree,
        state: OptimizerState,
        params: Tree | None = None,
        *,
        leaf_groups: LeafGroups | None = None,  # from `groups`
        **extra_args: Any,
    ) -> tuple[Tree, OptimizerState]:
        del extra_args  # for other transforms in a chain
        if params is None:
            raise ValueError(
                "this optimizer needs the parameters: call update(gradients, state, params)"
            )
        names = names_of(params)
        _check_state(state, names)
        given = leaves_of_gradients(gradients, params)
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
        if not lazy:
            given = jax.tree.leaves(to_dense(given, leaves), is_leaf=lambda node: node is None)
        layout = layout_of(state.slots, params)
        now = rate(state.count)
        own_groups = _groups_of(params, leaf_groups)
        rates, decays = _numbers(own_groups, now, weight_decay, state.count)

        def apply(
            number: int,
            gradient: Gradient,
            parameter: jax.Array,
            own_rate: jax.Array,
            decay: jax.typing.ArrayLike | None,
            *values: jax.Array | None,
        ):
            rule_update = RuleUpdate(
                rule,
                own_rate,
                decay,
                state.count,
                rounding,
                lambda: noise_key(state.count, number),
            )
            own = {
                name: value for name, value in zip(names, values, strict=True) if value is not None
            }
            update, after = rule_update(gradient, parameter, own)
            return update, [after.get(name) for name in names]

        columns = [layout.arrays(state.slots[name]) for name in names]
        arrays = zip(
            join_gradients(layout, given, leaves),
            layout.join(leaves),
            join_numbers(layout, rates, leaves),
            join_numbers(layout, decays, leaves),
            *columns,
            strict=True,
        )
        results = [apply(number, *array) for number, array in enumerate(arrays)]
        split = split_updates(layout, [update for update, _ in results], given)
        updates = jax.tree.structure(params).unflatten(split)
        new_slots = {
            name: layout.store([after[n] for _, after in results]) for n, name in enumerate(names)
        }
        return updates, OptimizerState(state.count + 1, now.astype(jnp.float32), new_slots)

    return optax.GradientTransformationExtraArgs(
        init,
        update,  # pyright: ignore[reportArgumentType] - optax's type is for any state
    )


def _groups_of(params: Tree, groups: LeafGroups | None) -> list[Group | None]:
    """Return the group of each parameter."""
    if groups is None:
        return [None] * len(jax.tree.leaves(params))
    return [groups.find(name) for name, _ in leaves_with_names(params)]


def _numbers(
    groups: list[Group | None], rate: jax.Array, weight_decay: Scheduled | None, count: jax.Array
) -> tuple[list[jax.Array], list[jax.typing.ArrayLike | None]]:
    """Return each parameter's learning rate and weight decay; the same object for one group."""
    rates: dict[Group | None, jax.Array] = {}
    decays: dict[Group | None, jax.typing.ArrayLike | None] = {}
    for group in dict.fromkeys(groups):
        rates[group] = rate if group is None else group.rate(rate, count)
        decay = None if group is None else group.weight_decay
        if decay is not None and weight_decay is None:
            raise GroupError(
                group.match if group is not None else "",
                "weight_decay: this optimizer has none, because its update is not a step from the "
                "parameters; use its l2_regularization_strength",
            )
        decay = weight_decay if decay is None else decay
        is_zero = isinstance(decay, (int, float)) and decay == 0
        decays[group] = None if decay is None or is_zero else value_at(decay, count)
    return [rates[group] for group in groups], [decays[group] for group in groups]


def _check_state(state: object, names: list[str]) -> None:
    if not isinstance(state, OptimizerState) or set(state.slots) != set(names):
        found = (
            ", ".join(state.slots) if isinstance(state, OptimizerState) else type(state).__name__
        )
        expected = ", ".join(names) or "none"
        raise ValueError(
            f"the state must have the slots of this optimizer, {expected}, "
            f"got {found or 'no slots'}; init(params) makes a new state"
        )


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Return parameters plus updates, each leaf in its own dtype.

    `Rows` are added to the rows they list. A parameter whose update is None keeps its value.
    """

    def add(parameter: jax.Array, update: jax.Array | Rows | None) -> jax.Array:
        if update is None:
            return parameter
        return (
            update.add_to(parameter)
            if isinstance(update, Rows)
            else (parameter + update).astype(parameter.dtype)
        )

    given = leaves_of_gradients(updates, params, "updates")
    added = [
        add(jnp.asarray(leaf), update)
        for leaf, update in zip(jax.tree.leaves(params), given, strict=True)
    ]
    return jax.tree.structure(params).unflatten(added)


def current_learning_rate(opt_state: Tree) -> jax.Array | None:
    """Return the learning rate of the newest update; None if the state does not hold one.

    The states of ftrain's optimizers and of `optax.inject_hyperparams` do; plain optax closes over
    its rate. With `groups`, this is the rate of the parameters that are in none.
    """
    while nodes_of(opt_state, GroupsState):
        opt_state = jax.tree.map(
            lambda node: node.base if isinstance(node, GroupsState) else node,
            opt_state,
            is_leaf=lambda node: isinstance(node, GroupsState),
        )
    shown = optax.tree.get_all_with_path(opt_state, "learning_rate", _is_rate)
    return jnp.asarray(shown[0][1], jnp.float32) if shown else None


def _is_rate(path: tuple[Any, ...], value: Any) -> bool:
    # A parameter may have the same name inside a slot tree; a rate is a scalar outside of them.
    # `optax.inject_hyperparams` also keeps the state of a schedule under its name.
    is_number = isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0
    return is_number and not any(getattr(key, "name", None) == "slots" for key in path)
