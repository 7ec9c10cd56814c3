"""Which library an object is from, and how its models are called."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

# By module and name of a class, so that nothing is imported.
_CLASSES = {
    ("flax.nnx", "Module"): "nnx",
    ("flax.linen", "Module"): "linen",
    ("equinox", "Module"): "equinox",
    ("haiku", "Module"): "haiku",
    ("haiku", "Transformed"): "haiku",
    ("haiku", "TransformedWithState"): "haiku",
}
LIBRARIES = {"nnx": "flax.nnx", "linen": "flax.linen", "equinox": "equinox", "haiku": "haiku"}
CALLS = {
    "nnx": "ftrain.models.nnx(model)",
    "linen": "ftrain.models.linen(model, example_inputs)",
    "equinox": "ftrain.models.equinox(model)",
    "haiku": "ftrain.models.haiku(function, example_inputs)",
}
# Arguments and fields that choose between training and evaluation: their values in training.
TRAINS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "inference": False,
    "use_running_average": False,
}


def library_of(value: Any) -> str | None:
    """Return the adapter for an object, or for instances of a class: "nnx", "linen", ..."""
    cls = value if isinstance(value, type) else type(value)
    return next(
        (found for (module, name), found in _CLASSES.items() if is_a(cls, module, name)), None
    )


def is_a(cls: type, module: str, name: str) -> bool:
    """Return whether a class inherits from class `name` of `module` or of its submodules."""
    return any(
        base.__name__ == name
        and (base.__module__ == module or base.__module__.startswith(f"{module}."))
        for base in cls.__mro__
    )


def import_library(module: str, extra: str) -> Any:
    """Import an optional library, or raise ModuleNotFoundError that names its extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"{module} is not installed: pip install 'ftrain[{extra}]'", name=error.name
        ) from None


def wrong_object(adapter: str, value: Any, expected: str) -> TypeError:
    """Return the error for an object that an adapter cannot use."""
    other = library_of(value)
    if isinstance(value, type):
        got = f"the class {value.__name__}"
    elif other is not None:
        got = f"a {type(value).__name__}"
    else:
        got = f"a {type(value).__name__}, {value!r:.60}"
    if other not in (None, adapter):
        way_out = f"it is of {LIBRARIES[other]}: use {CALLS[other]}"
    elif isinstance(value, type):
        way_out = "make one: call the class"
    else:
        way_out = "for functions of your own use ftrain.models.Model(init, apply)"
    return TypeError(f"ftrain.models.{adapter} needs {expected}, got {got}; {way_out}")


def call_with(function: Callable[..., Any], name: str, value: Any) -> Any:
    """Call a function, or a class, with one argument: by its name, if it can have that name."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    # The metaclasses of libraries hide the signatures of classes.
    accepted = inspect.signature(inner.__init__ if isinstance(inner, type) else inner).parameters
    is_named = name in accepted or any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    return function(**{name: value}) if is_named else function(value)


def find_flags(
    adapter: str,
    signature: inspect.Signature,
    chosen: str | None,
    *,
    fields: Mapping[str, Any] | None = None,
) -> tuple[dict[str, bool], dict[str, bool]]:
    """Return the arguments of a call, and the fields, that are different in training.

    Their values are those in training.

    `chosen` is the only one if it is given; a name that is not known is True in training.
    """
    accepted = signature.parameters
    fields = fields or {}
    if chosen is None:
        # A layer with a field of its own refuses the argument of the same name.
        changed = {
            name: value
            for name, value in TRAINS.items()
            if name in fields and (name not in accepted or fields[name] is not None)
        }
        arguments = {
            name: value
            for name, value in TRAINS.items()
            if name in accepted and name not in changed
        }
        return arguments, changed
    value = TRAINS.get(chosen, True)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    if chosen in accepted or (takes_any and chosen not in fields):
        return {chosen: value}, {}
    if chosen in fields:
        return {}, {chosen: value}
    known = ", ".join([*accepted, *fields])
    raise ValueError(
        f"ftrain.models.{adapter}: train_argument {chosen!r} is no argument of the model; "
        f"there are {known}"
    )


def set_flags(flags: Mapping[str, bool], train: bool) -> dict[str, bool]:
    """Return the values of flags in training, or those in evaluation."""
    return {name: value == train for name, value in flags.items()}


def as_arrays(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs for `init`: shapes become arrays of zeros."""
    return jax.tree.map(
        lambda leaf: (
            jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        ),
        inputs,
    )


def check_inputs(
    adapter: str, signature: inspect.Signature, inputs: tuple[Any, ...], flags: dict[str, bool]
) -> None:
    """Raise TypeError if the model cannot be called with these example inputs."""
    try:
        signature.bind(*inputs, **flags)
    except TypeError as error:
        takes = ", ".join(name for name in signature.parameters if name not in flags)
        raise TypeError(
            f"ftrain.models.{adapter} needs an example of each input of the model ({takes}), "
            f"to make its parameters, got {len(inputs)}: {error}"
        ) from None
