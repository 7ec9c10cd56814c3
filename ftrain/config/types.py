"""Types: what a function's annotations let a config say."""

import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ftrain.training import Trigger

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_PLAIN = (int, float, bool, str, list, dict, tuple, Path, Any, type(None), typing.Literal)
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
        """Whether some TOML value can stand here."""
        return any(map(_is_plain, _members(self.annotation)))

    @property
    def takes_component(self) -> bool:
        """Whether a table with a `name` can stand here: a schedule, say."""
        return any(map(_is_callable, _members(self.annotation)))

    def check(self, value: Any) -> Any:
        """The value, or a ValueError that says what it should be."""
        try:
            return self.adapter().validate_python(value)
        except ValidationError as error:
            phrases = dict.fromkeys(each["msg"].removeprefix("Input ") for each in error.errors())
            raise ValueError(f"{' or '.join(phrases)}, got {value!r}") from None

    def adapter(self) -> TypeAdapter[Any]:
        """What checks a value, and describes itself as JSON Schema."""
        plain = [member for member in _members(self.annotation) if _is_plain(member)]
        sayable = [str if member is Path else member for member in plain if member is not type(None)]
        return TypeAdapter(functools.reduce(operator.or_, sayable or [Any]), config=_STRICT)


def parameters(function: Callable[..., Any], given: frozenset[str] = frozenset()) -> dict[str, Parameter]:
    """The arguments of `function` that a config may set by keyword: all but those `given` by the builder.

    An argument `when: Trigger` is spelled `every_steps` and `every_secs`.
    """
    hints = _hints(function)
    found: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if hints.get(name) is Trigger:
            found.append(Parameter("every_steps", int, getattr(parameter.default, "steps", None)))
            found.append(Parameter("every_secs", float, getattr(parameter.default, "secs", None)))
        else:
            found.append(Parameter(name, hints.get(name, Any), parameter.default))
    return {parameter.name: parameter for parameter in found}


def returned_type(function: Callable[..., Any]) -> Any:
    return _hints(function).get("return")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (NameError, TypeError, AttributeError):  # annotations that only a type checker can follow
        return {}


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, of unions inside it too; anything else is its only member."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in typing.get_args(annotation) for inner in _members(member))
    return (annotation,)


def _is_plain(member: Any) -> bool:
    return (typing.get_origin(member) or member) in _PLAIN


def _is_callable(member: Any) -> bool:
    origin = typing.get_origin(member) or member
    return member is Any or origin is Callable or (getattr(origin, "_is_protocol", False) and callable(origin))
