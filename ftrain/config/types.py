"""Types: what a function's annotations let a config say."""

import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union

from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError

from ftrain.training import Trigger

# How a config spells an argument `when: Trigger`, and the types of what it says.
TIMING = {"every_steps": int, "every_secs": float, "at_steps": list[int], "first_steps": int}
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_PLAIN = (int, float, bool, str, list, dict, tuple, Sequence, Path, Any, type(None), typing.Literal)
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

    @property
    def is_plain(self) -> bool:
        """Whether some TOML value can stand here; it has none for None."""
        return any(_is_plain(member) for member in _members(self.annotation) if member is not type(None))

    @property
    def takes_function(self) -> bool:
        """Whether a function can stand here, which a config names: "package.module:name"."""
        return any(map(_is_callable, _members(self.annotation)))

    def takes_component(self, table: dict[str, Any]) -> bool:
        """Whether this table stands for what a function makes: a schedule, say."""
        return self.takes_function or (Any in _members(self.annotation) and "name" in table)

    def check(self, value: Any) -> Any:
        """The value as the function wants it, or a ValueError that says what it should be."""
        try:
            checked = self.adapter().validate_python(value)
        except ValidationError as error:
            phrases = dict.fromkeys(each["msg"].removeprefix("Input ") for each in error.errors())
            raise ValueError(f"{' or '.join(phrases)}, got {value!r}") from None
        members = _members(self.annotation)
        return Path(checked) if isinstance(checked, str) and Path in members and str not in members else checked

    def adapter(self) -> TypeAdapter[Any]:
        """What checks a value, and describes itself as JSON Schema."""
        plain = [member for member in _members(self.annotation) if _is_plain(member)]
        sayable = [_in_toml(member) for member in plain if member is not type(None)]
        return TypeAdapter(functools.reduce(operator.or_, sayable or [Any]), config=_STRICT)


def parameters(function: Callable[..., Any], given: frozenset[str] = frozenset()) -> dict[str, Parameter]:
    """The arguments of `function` that a config may set by keyword: all but those `given` by the builder."""
    hints = _hints(function)
    found: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if hints.get(name) is Trigger:
            chosen = _spell(parameter.default)
            found += [Parameter(key, kind, chosen.get(key)) for key, kind in TIMING.items()]
        else:
            found.append(Parameter(name, hints.get(name, Any), parameter.default))
    return {parameter.name: parameter for parameter in found}


def _spell(trigger: Any) -> dict[str, Any]:
    """How a config would say a default trigger; those that it cannot say stay as they are."""
    steps, secs = getattr(trigger, "steps", None), getattr(trigger, "secs", None)
    return {"every_steps": steps, "every_secs": secs} if isinstance(steps or 0, int) else {}


def takes_trigger(function: Callable[..., Any]) -> bool:
    return _hints(function).get("when") is Trigger


def returned_type(function: Callable[..., Any]) -> Any:
    return _hints(function).get("return")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function; of those that only a type checker can follow, what is known without it."""
    target = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        written = getattr(target, "__annotations__", {})
        return {name: hint for name, hint in written.items() if not isinstance(hint, str)}


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, of unions inside it too; anything else is its only member."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in typing.get_args(annotation) for inner in _members(member))
    return (annotation,)


def _is_plain(member: Any) -> bool:
    if typing.get_origin(member) is Sequence:
        return all(map(_is_plain, typing.get_args(member)))
    return (typing.get_origin(member) or member) in _PLAIN


def _is_callable(member: Any) -> bool:
    origin = typing.get_origin(member) or member
    return origin is Callable or (getattr(origin, "_is_protocol", False) and callable(origin))


def _in_toml(member: Any) -> Any:
    """The type of the TOML value that becomes a member: a path is written as a string, a tuple as an array."""
    if member is Path:
        return str
    if typing.get_origin(member) is Sequence:
        return list[typing.get_args(member)[0]]
    return Annotated[member, Strict(False)] if (typing.get_origin(member) or member) is tuple else member
