"""Frozen parameters: named by `groups`, or found by tracing the optimizer's update.

`groups` states which parameters it freezes, so no gradient is computed for them. Those that
optax's transforms freeze have an update that is always zero: the trace of the update shows it.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ftrain.gradients.rows import Rows, is_rows
from ftrain.jaxpr import interpret
from ftrain.optimizers.parameter_group import frozen_names
from ftrain.tree import Tree, leaves_like, leaves_with_names, nodes_of

# Operations whose result is zero if their first operand is zero.
_LINEAR = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "div",
    "dynamic_slice",
    "gather",
    "neg",
    "pad",
    "real",
    "reduce_sum",
    "reshape",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
}
_SUMS = {"add", "add_any", "concatenate", "max", "min", "sub"}  # zero if all operands are zero


def without(tree: Tree, names: Collection[str]) -> Tree:
    """Return `tree`, of parameters or gradients, with None in the place of the leaves named."""
    if not names:
        return tree
    leaves = leaves_with_names(tree, is_leaf=is_rows)
    structure = jax.tree.structure(tree, is_leaf=is_rows)
    return structure.unflatten([None if name in names else leaf for name, leaf in leaves])


def fill_in(tree: Tree, params: Tree) -> Tree:
    """Return `tree`, made from `params` by `without`, with its missing leaves."""
    leaves, structure = jax.tree.flatten(params)
    pairs = zip(structure.flatten_up_to(tree), leaves, strict=True)
    return structure.unflatten([leaf if own is None else own for own, leaf in pairs])


def zero_missing(gradients: Tree, opt_state: Tree, params: Tree) -> Tree:
    """Return gradients with zeros for frozen parameters, if a transform keeps a state for them.

    Transforms of optax that sum gradients, before `groups` in a chain or around it, need a gradient
    for every parameter.
    """
    ends = tuple(f"/{name}" for name in frozen_names(opt_state))
    if not ends or not any(name.endswith(ends) for name, _ in leaves_with_names(opt_state)):
        return gradients
    leaves, structure = jax.tree.flatten(params)
    pairs = zip(structure.flatten_up_to(gradients), leaves, strict=True)
    return structure.unflatten(
        [jnp.zeros_like(leaf) if own is None else own for own, leaf in pairs]
    )


def zero_frozen(
    gradients: Tree,
    optimizer: optax.GradientTransformation,
    opt_state: Tree,
    params: Tree,
    **extra: Any,
) -> Tree:
    """Replace the gradients of frozen parameters by zeros.

    `optax.multi_transform` and `optax.masked` freeze parameters by `optax.set_to_zero()`. Gradients
    of frozen parameters must not count in a norm, and need not be computed.
    """
    if not nodes_of(opt_state, optax.MaskedState):  # no transform works on a part of the parameters
        return gradients
    frozen = frozen_leaves(optimizer, gradients, opt_state, params, **extra)
    if not any(frozen):
        return gradients
    pairs = zip(leaves_like(gradients, params, "gradients"), frozen, strict=True)
    zeroed = [zero_like(leaf) if is_frozen else leaf for leaf, is_frozen in pairs]
    return jax.tree.structure(params).unflatten(zeroed)


def frozen_leaves(
    optimizer: optax.GradientTransformation,
    gradients: Tree,
    opt_state: Tree,
    params: Tree,
    **extra: Any,
) -> list[bool]:
    """For each parameter, True if the traced update is zero for all gradients."""
    with_extra = optax.with_extra_args_support(optimizer)
    tables = jax.tree.leaves(params)
    given = jax.tree.map(
        _dense_shape, leaves_like(gradients, params, "gradients"), tables, is_leaf=_is_gradient
    )
    abstract = jax.tree.structure(params).unflatten(given)

    def update(gradients: Tree, opt_state: Tree, params: Tree) -> list[jax.Array]:
        updates, _ = with_extra.update(gradients, opt_state, params, grad=gradients, **extra)
        found = leaves_like(updates, params, "updates")
        return [jnp.ones(()) if leaf is None else leaf for leaf in found]

    try:
        traced = jax.make_jaxpr(update)(abstract, opt_state, params)
    except Exception:  # noqa: BLE001 - the update itself raises it again
        return [False] * len(tables)
    return _are_zero(traced.jaxpr, [False] * len(traced.jaxpr.invars))


def _is_gradient(node: object) -> bool:
    return node is None or is_rows(node)


def _dense_shape(
    gradient: jax.Array | Rows | None, table: jax.Array
) -> jax.ShapeDtypeStruct | None:
    if gradient is None:
        return None
    values = gradient.values if isinstance(gradient, Rows) else gradient
    return jax.ShapeDtypeStruct(jnp.shape(table), jnp.result_type(values))


def zero_like(gradient: jax.Array | Rows | None) -> jax.Array | Rows | None:
    """Return a gradient of the same form that is zero."""
    if gradient is None:
        return None
    return gradient.map(jnp.zeros_like) if isinstance(gradient, Rows) else jnp.zeros_like(gradient)


def _are_zero(jaxpr: Jaxpr, inputs: list[bool]) -> list[bool]:
    """For each result of a traced function, True if it is zero, given which inputs are zero."""
    consts = [False] * len(jaxpr.constvars)
    return interpret(jaxpr, consts, inputs, _are_results_zero, _is_zero)


def _is_zero(literal: jax.typing.ArrayLike) -> bool:
    return bool(np.all(np.asarray(literal) == 0))


def _are_results_zero(equation: JaxprEqn, operands: list[bool]) -> list[bool]:
    name = equation.primitive.name
    count = len(equation.outvars)
    if name in _LINEAR:
        return [operands[0]]
    if name == "mul":
        return [any(operands)]
    if name in _SUMS:
        return [all(operands)]
    if name == "select_n":
        return [all(operands[1:])]
    if name == "optimization_barrier":
        return operands
    if name == "cond":
        branches = [_are_zero(branch.jaxpr, operands[1:]) for branch in equation.params["branches"]]
        return [all(results) for results in zip(*branches, strict=True)]
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    called = called.jaxpr if isinstance(called, ClosedJaxpr) else called
    if not isinstance(called, Jaxpr) or name in ("scan", "while", "shard_map"):
        return [False] * count
    if len(called.invars) != len(operands) or len(called.outvars) != count:
        return [False] * count
    return _are_zero(called, operands)
