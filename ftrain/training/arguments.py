"""Checks of the arguments of a run: each error names what to pass instead."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ftrain.models import Model
from ftrain.models.library import CALLS, LIBRARIES, is_a, library_of
from ftrain.tree import Tree, leaves_with_names

SHOWN = 3  # leaves in a message
# Objects that are no models, and the way out; by module and name, so nothing is imported.
_FLAX_STATE = ("flax.training.train_state", "TrainState")
_OBJECTS = {
    _FLAX_STATE: (
        "pass its `params`, its `tx` as the optimizer, and batch statistics as model_state"
    ),
    ("ftrain.training.state", "TrainState"): (
        "pass its `params`; to continue from a state, use ftrain.Run(step, state, data)"
    ),
    ("flax.nnx", "Optimizer"): "pass ftrain.models.nnx(model), and its `tx` as the optimizer",
}
_COLLECTIONS = {"params", "batch_stats"}  # of the variables of a linen module
_DEFAULT = "pass the arrays only, and let the loss function close over the rest"


def check_arrays(what: str, tree: Tree) -> None:
    """Raise TypeError unless every leaf of `tree` is an array or a number."""
    if isinstance(tree, Model):
        raise TypeError(f"{what} is a Model, expected a tree of arrays; pass `model.{what}`")
    check_no_object(what, tree, "a tree of arrays")
    if isinstance(tree, Mapping) and tree.keys() >= _COLLECTIONS:
        raise TypeError(
            f"{what} has the collections {', '.join(map(str, tree))} of flax, which are not all "
            'trained; pass variables["params"], and the others as model_state, '
            "or ftrain.models.linen(model, example_inputs)"
        )
    wrong = [(name, leaf) for name, leaf in leaves_with_names(tree) if not _is_array(leaf)]
    if not wrong:
        return
    shown = "; ".join(_describe(what, name, leaf) for name, leaf in wrong[:SHOWN])
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    raise TypeError(f"{what} must be a tree of arrays: {shown}{more}; {_DEFAULT}")


def check_no_object(what: str, value: Any, expected: str) -> None:
    """Raise TypeError for a model or a state of a library; the message says how to use it."""
    for (module, name), way_out in _OBJECTS.items():
        if is_a(type(value), module, name):
            kind = f"{module}.{name}".replace("ftrain.training.state", "ftrain")
            raise TypeError(
                f"{what} is a {kind} ({type(value).__name__}), expected {expected}; {way_out}"
            )
    library = library_of(value)
    if library is None or (library == "equinox" and _holds_only_arrays(value)):
        return
    raise TypeError(
        f"{what} is a model of {LIBRARIES[library]} ({_name(value)}), expected {expected}; "
        f"pass {CALLS[library]}"
    )


def check_init(what: str, init: Any) -> None:
    """Raise TypeError unless it is a function of a key that makes parameters, or a Model."""
    check_no_object(what, init, "a function of a key, or a Model")
    if isinstance(init, Model):
        return
    if isinstance(getattr(init, "__self__", None), Model):
        raise TypeError(f"{what} is a method of a Model: pass the model itself")
    if not callable(init):
        raise TypeError(
            f"{what} must be a function of a key that returns parameters, or an "
            f"ftrain.models.Model, got a {type(init).__name__}"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError unless it is an optax transform, or has `init` and `update`."""
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return
    if is_a(type(optimizer), "flax.nnx", "Optimizer"):
        raise TypeError("optimizer is a flax.nnx.Optimizer; pass its `tx`, an optax transform")
    name = getattr(optimizer, "__name__", None)
    got = (
        f"the function {name}: call it, {name}(...)"
        if callable(optimizer) and name
        else f"{optimizer!r:.60}"
    )
    raise TypeError(f"optimizer must be an optax.GradientTransformation, got {got}")


def call_with_model_state(
    what: str, function: Callable[..., Any], given: Mapping[str, Any], model_state: Tree | None
) -> Any:
    """Call a function of the user; a model state, if there is one, is one more last argument.

    Raises TypeError if the function is of the other form.
    """
    arguments = dict(given) if model_state is None else {**given, "model_state": model_state}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not every callable has one
        return function(*arguments.values())
    try:
        signature.bind(*arguments.values())
    except TypeError as error:
        form = f"{what}({', '.join(arguments)})"
        reason = "there is no model state" if model_state is None else "the state has a model state"
        raise TypeError(f"{what} is called as {form}, because {reason}: {error}") from None
    return function(*arguments.values())


def describe_state(state: Any) -> str:
    """Describe an object that is not a state, and what to pass instead."""
    if is_a(type(state), *_FLAX_STATE):
        return "flax's TrainState; make ftrain's, ftrain.TrainState.create(state.params, state.tx)"
    if isinstance(state, Model):
        return "a Model; make a state, ftrain.TrainState.create(model, optimizer)"
    library = library_of(state)
    if library is not None:
        made = f"ftrain.TrainState.create({CALLS[library]}, optimizer)"
        return f"a model of {LIBRARIES[library]}; make a state, {made}"
    return f"a {type(state).__name__}"


def _name(value: Any) -> str:
    return (value if isinstance(value, type) else type(value)).__name__


def _holds_only_arrays(tree: Tree) -> bool:
    """Return whether this is a result of `eqx.partition`: a module of arrays and None."""
    return not isinstance(tree, type) and all(
        _is_array(leaf) for _, leaf in leaves_with_names(tree)
    )


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
