"""Types: what a function's signature lets a config say."""

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ftrain.config.forms import Form, Made, alternatives, form_of, is_record, is_sayable
from ftrain.training import Trigger

# How a config spells an argument `when: Trigger`, and the types of what it says.
TIMING = {"every_steps": int, "every_secs": float, "at_steps": list[int], "first_steps": int}
_MISSING = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """One key of a table: an argument of the function that the table calls."""

    name: str
    annotation: Any
    default: Any = _MISSING

    @property
    def required(self) -> bool:
        return self.default is _MISSING

    @functools.cached_property
    def form(self) -> Form:
        """The TOML values that can stand here."""
        return form_of(self.annotation)

    @property
    def is_sayable(self) -> bool:
        """Whether a config can say a value without naming a function of its own."""
        return is_sayable(self.form)

    @property
    def takes_function(self) -> bool:
        """Whether a function can stand here, which a config names: "package.module:name"."""
        return any(isinstance(form, Made) and form.is_function for form in alternatives(self.form))


def parameters(
    function: Callable[..., Any], given: frozenset[str] = frozenset()
) -> dict[str, Parameter]:
    """The arguments of `function` that a config may set by keyword: all but those `given` by the builder.

    `*args` with an annotation is one of them, an array: `optax.chain` takes `args = [...]`.
    """
    if typing.is_typeddict(function):
        return _entries(function)
    hints = _hints(function)
    found: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            found += [Parameter(name, list[hints[name]], None)] if name in hints else []
        elif hints.get(name) is Trigger:
            chosen = _spell(parameter.default)
            found += [Parameter(key, kind, chosen.get(key)) for key, kind in TIMING.items()]
        else:
            found.append(Parameter(name, hints.get(name, Any), _default(function, parameter)))
    return {parameter.name: parameter for parameter in found}


def _entries(cls: Any) -> dict[str, Parameter]:
    """The keys of a TypedDict; it does not see itself which of them may be left out if annotations are strings."""
    found: dict[str, Parameter] = {}
    for name, hint in _class_hints(cls, include_extras=True).items():
        origin = typing.get_origin(hint)
        is_optional = origin is typing.NotRequired or (
            origin is not typing.Required and name in cls.__optional_keys__
        )
        found[name] = Parameter(name, hint, None if is_optional else _MISSING)
    return found


def as_positional(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments as `function` takes them; if `*args` are given, what stands before them goes by position."""
    signature = (
        [] if typing.is_typeddict(function) else inspect.signature(function).parameters.values()
    )
    various = next((each.name for each in signature if each.kind is each.VAR_POSITIONAL), None)
    if various is None or various not in arguments:
        return [], dict(arguments)
    named, positional = dict(arguments), []
    for parameter in signature:
        if parameter.name == various:
            return [*positional, *named.pop(various)], named
        positional.append(named.pop(parameter.name, parameter.default))
    raise AssertionError(f"{various} is a parameter")


def takes_trigger(function: Callable[..., Any]) -> bool:
    return _hints(function).get("when") is Trigger


def returned_type(function: Callable[..., Any]) -> Any:
    return _hints(function).get("return")


def _spell(trigger: Any) -> dict[str, Any]:
    """How a config would say a default trigger; those that it cannot say stay as they are."""
    steps, secs = getattr(trigger, "steps", None), getattr(trigger, "secs", None)
    return {"every_steps": steps, "every_secs": secs} if isinstance(steps or 0, int) else {}


def _default(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The default of an argument; of a dataclass's field, what its factory makes."""
    field = (
        getattr(function, "__dataclass_fields__", {}).get(parameter.name)
        if inspect.isclass(function)
        else None
    )
    factory = getattr(field, "default_factory", None)
    if not callable(factory) or parameter.default is _MISSING:
        return parameter.default
    try:
        return factory()
    except Exception:  # noqa: BLE001 - it is the user's, and is called again when the class is
        return parameter.default


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, or of a class that is called; strings among them are looked up."""
    if inspect.isclass(function):
        own = _resolved(function.__init__)
        return own | _class_hints(function) if is_record(function) else own
    target = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    is_instance = not hasattr(target, "__annotations__") and not inspect.isbuiltin(target)
    return _resolved(type(target).__call__ if is_instance else target)


def _class_hints(cls: type, *, include_extras: bool = False) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        module = sys.modules.get(base.__module__)
        names = {} if module is None else vars(module)
        hints |= _look_up(
            inspect.get_annotations(base),
            {**names, cls.__name__: cls, base.__name__: base},
            include_extras,
        )
    return hints


def _resolved(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target)
    except Exception:  # noqa: BLE001 - a string may be any text; those that are types are still looked up
        return _look_up(getattr(target, "__annotations__", {}), getattr(target, "__globals__", {}))


def _look_up(
    written: Mapping[str, Any], names: Mapping[str, Any], include_extras: bool = False
) -> dict[str, Any]:
    """The annotations that can be resolved, each by itself: one may be known to a type checker alone."""
    hints: dict[str, Any] = {}
    for name, hint in written.items():
        holder = types.SimpleNamespace(__annotations__={name: hint})
        try:
            hints |= typing.get_type_hints(holder, dict(names), include_extras=include_extras)
        except Exception:  # noqa: BLE001 - a string may be any text
            continue
    return hints
