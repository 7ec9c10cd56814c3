"""The lift from one elementwise rule to an optax transform, and what every optimizer's state shows."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ftrain.schedules import Schedule
from ftrain.tree import Tree

LearningRate = float | jax.Array | Schedule
Slots = Mapping[str, jax.Array]

# (gradient, parameter, slots, learning rate, updates applied before this one) -> (update, new slots)
Rule = Callable[[jax.Array, jax.Array, Slots, jax.Array, jax.Array], tuple[jax.Array, Slots]]


class OptimizerState(NamedTuple):
    count: jax.Array  # updates applied so far  # pyright: ignore[reportIncompatibleMethodOverride] - optax's name
    learning_rate: jax.Array  # of the newest update, for metrics to show
    slots: dict[str, Tree]  # by slot name, each shaped like the parameters


def from_rule(
    rule: Rule, learning_rate: LearningRate, slots: Mapping[str, float] | None = None
) -> optax.GradientTransformation:
    """An optax transform that applies `rule` to every leaf.

    `slots` names what the rule keeps for each parameter, with the value it starts from.
    """
    slots = dict(slots or {})
    if isinstance(learning_rate, (int, float)) and not learning_rate >= 0:
        raise ValueError(f"learning_rate must be >= 0, got {learning_rate}")

    def rate(count: jax.Array) -> jax.Array:
        return jnp.asarray(learning_rate(count) if callable(learning_rate) else learning_rate)

    def init(params: Tree) -> OptimizerState:
        count = jnp.zeros((), jnp.int32)
        filled = {
            name: jax.tree.map(lambda leaf, value=value: jnp.full_like(leaf, value), params)
            for name, value in slots.items()
        }
        return OptimizerState(count, rate(count).astype(jnp.float32), filled)

    def update(gradients: Tree, state: OptimizerState, params: Tree | None = None):
        if params is None:
            raise ValueError("this optimizer needs the parameters: call update(gradients, state, params)")
        now = rate(state.count)

        def one(gradient: jax.Array, parameter: jax.Array, *values: jax.Array):
            named = dict(zip(slots, values, strict=True))
            return rule(gradient, parameter, named, now.astype(parameter.dtype), state.count)

        results = jax.tree.map(one, gradients, params, *(state.slots[name] for name in slots))
        updates, new_slots = _split(gradients, results, slots)
        return updates, OptimizerState(state.count + 1, now.astype(jnp.float32), new_slots)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType] - optax types params narrower


def _split(gradients: Tree, results: Tree, names: Mapping[str, Any]) -> tuple[Tree, dict[str, Tree]]:
    """A tree of (update, slots) pairs, as a tree of updates and one tree for each slot."""
    structure = jax.tree.structure(gradients)
    pairs = structure.flatten_up_to(results)
    updates = structure.unflatten([update for update, _ in pairs])
    return updates, {name: structure.unflatten([kept[name] for _, kept in pairs]) for name in names}


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Parameters plus updates, each leaf in its own dtype."""
    return optax.apply_updates(params, updates)


def current_learning_rate(opt_state: Tree) -> jax.Array | None:
    """The rate of the newest update, found in any optimizer state that shows one.

    ftrain's optimizers and `optax.inject_hyperparams` do; plain optax closes over its rate and shows none.
    """
    shown = optax.tree.get_all_with_path(opt_state, "learning_rate", _is_rate)
    return jnp.asarray(shown[0][1], jnp.float32) if shown else None


def _is_rate(path: tuple[Any, ...], value: Any) -> bool:
    # A parameter may carry the same name inside a slot tree; a rate is a scalar outside of them.
    return jnp.ndim(value) == 0 and not any(getattr(key, "name", None) == "slots" for key in path)
