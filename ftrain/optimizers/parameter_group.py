"""A parameter group: parameters whose names match a pattern, and how they are updated."""

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ftrain.hyperparameters import check_finite, check_not_negative
from ftrain.schedules import Scheduled, value_at
from ftrain.tree import Tree, nodes_of

_NAME = re.compile(r"[\w.-]*")


class GroupError(ValueError):
    """Groups and parameters do not fit; `match` is the pattern of the group to change."""

    def __init__(self, match: str, message: str):
        super().__init__(message)
        self.match = match


@dataclasses.dataclass(frozen=True, eq=False)  # by identity: a schedule or an array has no hash
class Group:
    """The parameters whose whole names match a regular expression, with settings of their own.

        Group("encoder/.*", freeze=True)
        Group(".*/bias", weight_decay=0.0)

    Args:
      match: a regular expression for the whole name, as `ftrain.tree.named_leaves` names them.
      freeze: these parameters never change. They have no slots, no gradient, no part in norms.
      learning_rate: replaces that of the optimizer.
      learning_rate_scale: multiplies the learning rate of the optimizer, schedule or not.
      weight_decay: replaces that of the optimizer: p -= lr * weight_decay * p, with the learning
        rate of the group and besides the update from the gradient, as in AdamW.
      optimizer: updates these parameters instead.
      name: for metrics, `learning_rate/NAME`, and for checkpoints; by default made from `match`.

    The numbers may be schedules, of the number of updates.
    """

    match: str
    _: dataclasses.KW_ONLY
    freeze: bool = False
    learning_rate: Scheduled | None = None
    learning_rate_scale: Scheduled | None = None
    weight_decay: Scheduled | None = None
    optimizer: optax.GradientTransformation | None = None
    name: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"match must be a regular expression, got {self.match!r:.60}: {error}"
            ) from None
        check_finite(learning_rate=self.learning_rate)
        check_not_negative(
            learning_rate_scale=self.learning_rate_scale, weight_decay=self.weight_decay
        )
        self._check_settings()
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name must consist of letters, digits, _, . and -, got {self.name!r}")
        if not self.name:
            object.__setattr__(self, "name", _name_from(self.match))

    def _check_settings(self) -> None:
        numbers = ("learning_rate", "learning_rate_scale", "weight_decay")
        chosen = [name for name in numbers if getattr(self, name) is not None]
        if self.freeze and (chosen or self.optimizer is not None):
            raise ValueError(
                f"group {self.match!r} has freeze and {(*chosen, 'optimizer')[0]}: "
                "frozen parameters are never updated, choose one"
            )
        if self.optimizer is not None and chosen:
            raise ValueError(
                f"group {self.match!r} has optimizer and {chosen[0]}: "
                "set that number in the group's own optimizer"
            )
        if {"learning_rate", "learning_rate_scale"} <= {*chosen}:
            raise ValueError(
                f"group {self.match!r} has learning_rate and learning_rate_scale: choose one"
            )
        if not (self.freeze or chosen or self.optimizer is not None):
            raise ValueError(
                f"group {self.match!r} changes nothing: give it freeze, optimizer, "
                f"{', '.join(numbers[:-1])} or {numbers[-1]}"
            )

    @property
    def has_own_rate(self) -> bool:
        """True if the learning rate differs from that of the optimizer for all."""
        return self.learning_rate is not None or self.learning_rate_scale is not None

    def rate(self, base: jax.Array, count: jax.Array) -> jax.Array:
        """The learning rate after `count` updates, where that of the optimizer is `base`."""
        if self.learning_rate is not None:
            return jnp.asarray(value_at(self.learning_rate, count, base.dtype), base.dtype)
        if self.learning_rate_scale is not None:
            return base * value_at(self.learning_rate_scale, count, base.dtype)
        return base


class LeafGroups:
    """The groups that change numbers of an optimizer, by the names of their parameters.

    `groups` passes them to `update` of the optimizer, and sees which were found there: a transform
    between the two may drop them, or give parameters other names.
    """

    def __init__(self, groups: Mapping[str, Group]):
        self.groups = dict(groups)
        self.found: set[str] = set()

    def find(self, name: str) -> Group | None:
        """Return the group of a parameter."""
        self.found.add(name)
        return self.groups.get(name)

    def check_found(self) -> None:
        """Raise GroupError for a parameter that no optimizer asked for."""
        for name, group in self.groups.items():
            if name not in self.found:
                raise GroupError(
                    group.match,
                    f"the numbers of group {group.match!r} do not reach the optimizer of parameter "
                    f"{name}: a transform around it hides the parameter or drops arguments; "
                    "put groups inside of that transform",
                )


def _name_from(pattern: str) -> str:
    """Return the words of a pattern, without conditions on what is not matched.

    >>> _name_from("(?!encoder/).*/bias")
    'bias'
    """
    matched = re.sub(r"\(\?<?[!=][^()]*\)", "", pattern)
    return re.sub(r"\W+", "_", matched).strip("_") or "group"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """The names of frozen parameters: a part of an optimizer's state without arrays."""

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})


class GroupsState(NamedTuple):
    """The state of `groups`."""

    base: Tree  # of the optimizer for all parameters without their own, none of them frozen
    own: dict[str, Tree]  # of the groups that have their own, by name
    learning_rates: dict[str, jax.Array]  # of the newest update, by name, where groups change them
    frozen: Frozen


def frozen_names(opt_state: Tree) -> frozenset[str]:
    """Return the names of the parameters that `groups` freezes, wherever in a chain it is."""
    return frozenset(name for frozen in nodes_of(opt_state, Frozen) for name in frozen.names)
