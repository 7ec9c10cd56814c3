"""Checks of the arguments of a run: each error names what to pass instead."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ftrain.tree import Tree, leaves_with_names

SHOWN = 3  # leaves in a message
# How objects of libraries become trees of arrays; by module and name, so nothing is imported.
_FLAX_STATE = ("flax.training.train_state", "TrainState")
_OBJECTS = {
    _FLAX_STATE: "pass its `params`, and its `tx` as the optimizer",
    (
        "ftrain.training.state",
        "TrainState",
    ): "pass its `params`; to continue from a state, use ftrain.Run(step, state, data)",
    ("flax.nnx", "Module"): (
        "split it, `graphdef, params = nnx.split(model)`, "
        "and in the loss `model = nnx.merge(graphdef, params)`"
    ),
    (
        "flax.linen",
        "Module",
    ): 'pass `model.init(rng, inputs)["params"]`, and in the loss call `model.apply`',
}
_EQUINOX = (
    "`params, static = eqx.partition(model, eqx.is_array)`, "
    "and in the loss `model = eqx.combine(params, static)`"
)
_DEFAULT = "pass the arrays only, and let the loss function close over the rest"


def check_arrays(what: str, tree: Tree) -> None:
    """Raise TypeError unless every leaf of `tree` is an array or a number."""
    for (module, name), way_out in _OBJECTS.items():
        if _is_a(tree, module, name):
            kind = f"{module}.{name}".replace("ftrain.training.state", "ftrain")
            raise TypeError(
                f"{what} is a {kind} ({type(tree).__name__}), expected a tree of arrays; {way_out}"
            )
    wrong = [(name, leaf) for name, leaf in leaves_with_names(tree) if not _is_array(leaf)]
    if not wrong:
        return
    shown = "; ".join(_describe(what, name, leaf) for name, leaf in wrong[:SHOWN])
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    way_out = _EQUINOX if _is_a(tree, "equinox", "Module") else _DEFAULT
    raise TypeError(f"{what} must be a tree of arrays: {shown}{more}; {way_out}")


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError unless it is an optax transform, or has `init` and `update`."""
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return
    name = getattr(optimizer, "__name__", None)
    got = (
        f"the function {name}: call it, {name}(...)"
        if callable(optimizer) and name
        else f"{optimizer!r:.60}"
    )
    raise TypeError(f"optimizer must be an optax.GradientTransformation, got {got}")


def describe_state(state: Any) -> str:
    """Describe an object that is not a state, and what to pass instead."""
    if _is_a(state, *_FLAX_STATE):
        return "flax's TrainState; make ftrain's, ftrain.TrainState.create(state.params, state.tx)"
    return f"a {type(state).__name__}"


def _describe(what: str, name: str, leaf: Any) -> str:
    place = f"leaf {what}/{name}" if name else "it"
    kind = (
        f"an array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
    )
    return f"{place} is {kind}, {leaf!r:.40}"


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (str, bytes, type, np.dtype)):  # they may name a dtype
        return False
    try:
        jnp.result_type(leaf)
    except (TypeError, ValueError):
        return False
    return True


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return whether a value is an instance of class `name` of `module` or its submodules."""
    for base in type(value).__mro__:
        is_inside = base.__module__ == module or base.__module__.startswith(f"{module}.")
        if base.__name__ == name and is_inside:
            return True
    return False
