"""Parameter groups: one optimizer for all parameters, with exceptions by the parameters' names."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ftrain.gradients.guard import check_transform
from ftrain.gradients.rows import Rows
from ftrain.optimizers.checks import leaves_of_gradients
from ftrain.optimizers.frozen import fill_in, zero_like
from ftrain.optimizers.parameter_group import (
    Frozen,
    Group,
    GroupError,
    GroupsState,
    LeafGroups,
)
from ftrain.optimizers.rule import current_learning_rate
from ftrain.optimizers.slots import OptimizerState
from ftrain.tree import Tree, leaves_like, leaves_with_names, nodes_of


def groups(
    optimizer: optax.GradientTransformation, groups: Sequence[Group]
) -> optax.GradientTransformationExtraArgs:
    """Wrap `optimizer`: parameters whose names match a group are updated as the group says.

        optimizer = groups(
            adam(1e-3, weight_decay=0.1),
            [
                Group("encoder/.*", freeze=True),
                Group("decoder/.*/bias", weight_decay=0.0),
                Group("head/.*", learning_rate_scale=10.0),
                Group("embedding", optimizer=adagrad(0.1)),
            ],
        )

    A group that matches no parameter, and a parameter that matches two groups, is a GroupError in
    `init`. All other parameters are updated by `optimizer` as without groups.

    One state of `optimizer` is for all parameters that it updates, whatever their learning rates:
    a clipping by the global norm in it sees all of them. Frozen parameters and those of a group
    with its own optimizer are not in that state. A frozen parameter has no state at all, and a step
    of `make_step` computes no gradient for it. A gradient that `update` is given is ignored.

    An optimizer that is not ftrain's hides its learning rate. Its groups may freeze, have an
    optimizer, or a `learning_rate_scale` that is a number, which multiplies the updates.
    """
    check_transform(optimizer)
    named = _by_name(groups)
    base = optax.with_extra_args_support(optimizer)
    if not named:
        return base
    own = {
        name: optax.with_extra_args_support(group.optimizer)
        for name, group in named.items()
        if group.optimizer is not None
    }

    def init(params: Tree) -> GroupsState:
        parts = _Parts(params, named)
        parts.check_some_trained()
        base_state = base.init(parts.take(None))
        _check_numbers(named.values(), base_state)
        return GroupsState(
            base=base_state,
            own={name: each.init(parts.take(name)) for name, each in own.items()},
            learning_rates=_rates(named, base_state),
            frozen=Frozen(tuple(parts.frozen)),
        )

    def update(
        gradients: Tree,
        state: GroupsState,
        params: Tree | None = None,
        *,
        leaf_groups: LeafGroups | None = None,  # from other groups around these
        **extra: Any,
    ) -> tuple[Tree, GroupsState]:
        if params is None:
            raise ValueError("groups need the parameters: call update(gradients, state, params)")
        if not isinstance(state, GroupsState) or state.own.keys() != own.keys():
            raise ValueError("the state is not one of these groups: init(params) makes a new state")
        parts = _Parts(params, named)
        given = leaves_of_gradients(gradients, params)
        hides_rate = not nodes_of(state.base, OptimizerState)
        changed = LeafGroups({} if hides_rate else parts.changed())
        passed_on = _join(changed, leaf_groups)
        if passed_on.groups:
            extra["leaf_groups"] = passed_on
        results: list[Any] = [zero_like(leaf) for leaf in given]  # for frozen parameters

        def update_part(
            name: str | None, transform: optax.GradientTransformationExtraArgs, before: Tree
        ) -> Tree:
            if all(given[n] is None for n in parts.members(name)):
                return before
            part = parts.take(name)
            restricted = parts.restricted(name, extra)
            updates, after = transform.update(parts.take(name, given), before, part, **restricted)
            found = leaves_like(updates, part, "updates")
            for n, leaf in zip(parts.members(name), found, strict=True):
                results[n] = leaf
            return after

        base_state = update_part(None, base, state.base)
        own_states = {name: update_part(name, own[name], state.own[name]) for name in own}
        if not all(given[n] is None for n in parts.members(None)):
            changed.check_found()
        if hides_rate:
            results = [
                _scaled(leaf, group) for leaf, group in zip(results, parts.groups, strict=True)
            ]
        after = GroupsState(base_state, own_states, _rates(named, base_state), state.frozen)
        return parts.structure.unflatten(results), after

    # optax's type is for any state and parameters; these are narrower.
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def group_learning_rates(opt_state: Tree) -> dict[str, jax.Array]:
    """Return the learning rates of groups at the newest update, where they have their own."""
    shown: dict[str, jax.Array] = {}
    for state in nodes_of(opt_state, GroupsState):
        own = {name: current_learning_rate(each) for name, each in state.own.items()}
        shown |= group_learning_rates(state.base) | state.learning_rates
        shown |= {name: rate for name, rate in own.items() if rate is not None}
    return shown


def groups_of(groups: Sequence[Group], params: Tree) -> list[Group | None]:
    """Return the group of each parameter, in the order of the tree; None for those in none.

    Raises GroupError for a group that matches nothing, and for a parameter that matches two.
    """
    names = [name for name, _ in leaves_with_names(params)]
    patterns = [re.compile(group.match) for group in groups]
    found: list[Group | None] = []
    for name in names:
        fitting = [
            group for group, each in zip(groups, patterns, strict=True) if each.fullmatch(name)
        ]
        if len(fitting) > 1:
            first, second = fitting[:2]
            raise GroupError(
                second.match,
                f"parameter {name} matches two groups, {first.match!r} and {second.match!r}; "
                f"exclude it from one, as in '(?!{re.escape(name)}$)...'",
            )
        found.append(fitting[0] if fitting else None)
    for group in groups:
        if not any(each is group for each in found):
            known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise GroupError(
                group.match,
                f"pattern {group.match!r} matches no parameter; it must match a whole name, such "
                f"as {known or 'none'}",
            )
    return found


class _Parts:
    """The parameters of a tree by the optimizer that updates them: None, a group's name, no one."""

    def __init__(self, params: Tree, named: Mapping[str, Group]):
        self.leaves, self.structure = jax.tree.flatten(params)
        self.names = [name for name, _ in leaves_with_names(params)]
        self.groups = groups_of([*named.values()], params)
        self.frozen = [
            name
            for name, group in zip(self.names, self.groups, strict=True)
            if group is not None and group.freeze
        ]
        own = {group: name for name, group in named.items() if group.optimizer is not None}
        self._members: dict[str | None, list[int]] = {None: []}
        for number, group in enumerate(self.groups):
            if group is None or not group.freeze:
                name = None if group is None else own.get(group)
                self._members.setdefault(name, []).append(number)

    def check_some_trained(self) -> None:
        """Raise GroupError if every parameter is frozen."""
        if self.names and len(self.frozen) == len(self.names):
            match = next(group.match for group in self.groups if group is not None)
            raise GroupError(match, "all parameters are frozen, so there is nothing to train")

    def changed(self) -> dict[str, Group]:
        """Return the groups that change numbers of the base, by the parameter's name."""
        return {
            name: group
            for name, group in zip(self.names, self.groups, strict=True)
            if group is not None and not group.freeze and group.optimizer is None
        }

    def members(self, name: str | None) -> list[int]:
        """Return the positions of the parameters of one optimizer."""
        return self._members[name]

    def take(self, name: str | None, leaves: Sequence[Any] | None = None) -> Tree:
        """Return the tree with only these leaves, or the parameters, of one optimizer."""
        chosen = {*self.members(name)}
        whole = self.leaves if leaves is None else leaves
        return self.structure.unflatten(
            [leaf if n in chosen else None for n, leaf in enumerate(whole)]
        )

    def restricted(self, name: str | None, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `update` that hold parameters or gradients, for one optimizer."""
        restricted = dict(extra)
        if "grad" in extra:
            restricted["grad"] = self.take(name, self.structure.flatten_up_to(extra["grad"]))
        if "value_fn" in extra:
            whole = self.structure.unflatten(self.leaves)
            restricted["value_fn"] = lambda part: extra["value_fn"](fill_in(part, whole))
        return restricted


def _by_name(groups: Sequence[Group]) -> dict[str, Group]:
    """Return the groups by name; a number is added to names that several have."""
    named: dict[str, Group] = {}
    for group in groups:
        if not isinstance(group, Group):
            raise TypeError(
                "groups must be a list of ftrain.optimizers.Group, such as "
                f'Group("encoder/.*", freeze=True), got {group!r:.60}'
            )
        name, number = group.name, 1
        while name in named:
            number += 1
            name = f"{group.name}_{number}"
        named[name] = group
    return named


def _join(own: LeafGroups, outer: LeafGroups | None) -> LeafGroups:
    """Return the groups of both, with one record of those that are found."""
    if outer is None:
        return own
    for name in own.groups.keys() & outer.groups.keys():
        raise GroupError(
            own.groups[name].match,
            f"parameter {name} matches this group, and a group of the groups around them",
        )
    joined = LeafGroups(own.groups | outer.groups)
    joined.found = own.found = outer.found
    return joined


def _check_numbers(groups: Iterable[Group], base_state: Tree) -> None:
    """Raise GroupError for a number that an optimizer cannot take because it hides its own."""
    if nodes_of(base_state, OptimizerState):
        return
    for group in groups:
        wrong = [
            name for name in ("learning_rate", "weight_decay") if getattr(group, name) is not None
        ]
        wrong += ["a schedule as learning_rate_scale"] * callable(group.learning_rate_scale)
        if wrong:
            raise GroupError(
                group.match,
                f"the optimizer is not one of ftrain's, so a group cannot have {wrong[0]}; "
                "give the group its own optimizer, or a number as learning_rate_scale",
            )


def _rates(named: Mapping[str, Group], base_state: Tree) -> dict[str, jax.Array]:
    """Return the rates of the newest update, of groups that differ from the base in it."""
    own = {name: group for name, group in named.items() if group.has_own_rate}
    states = nodes_of(base_state, OptimizerState)
    if states:
        newest = jnp.maximum(states[0].count - 1, 0)
        return {name: group.rate(states[0].learning_rate, newest) for name, group in own.items()}
    rate = current_learning_rate(base_state)
    return {} if rate is None else {n: group.rate(rate, jnp.int32(0)) for n, group in own.items()}


def _scaled(update: Any, group: Group | None) -> Any:
    """The update of an optimizer that hides its learning rate."""
    scale = None if group is None else group.learning_rate_scale
    if scale is None or update is None or callable(scale):
        return update

    def multiply(values: jax.Array) -> jax.Array:
        return values * jnp.asarray(scale, values.dtype)

    return update.map(multiply) if isinstance(update, Rows) else multiply(update)
