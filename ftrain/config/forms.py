"""Forms: the TOML values that an annotation allows, as a small tree; checks of single values."""

import collections.abc
import dataclasses
import datetime
import enum
import inspect
import math
import os
import pathlib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ftrain.schedules import Schedule


@dataclass(frozen=True)
class Plain:
    """The form of scalars of TOML, Literals, and unions of them."""

    type: Any


@dataclass(frozen=True)
class Text:
    """A string that is converted: a path, a dtype."""

    noun: str
    make: Callable[[str], Any]


@dataclass(frozen=True)
class Choice:
    """A member of an enum, by its name or by its value."""

    members: type[enum.Enum]


@dataclass(frozen=True)
class Items:
    """An array of any length."""

    item: "Form"
    container: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Row:
    """An array of fixed length, with a form for each entry: tuple[int, str]."""

    items: tuple["Form", ...]


@dataclass(frozen=True)
class Entries:
    """A table with any keys: dict[str, float]. `key` converts TOML's strings."""

    key: Callable[[str], Any]
    value: "Form"


@dataclass(frozen=True)
class Record:
    """A table whose keys are the fields of a class: a dataclass, a NamedTuple, a TypedDict."""

    cls: type


@dataclass(frozen=True)
class Made:
    """What only a call can make: a table with a `name`, or for a function its name as a string."""

    role: Literal["optimizer", "schedule", "function", "instance"]
    annotation: Any

    @property
    def is_function(self) -> bool:
        """True if the name of a function is enough."""
        return self.role in ("schedule", "function")


@dataclass(frozen=True)
class Anything:
    """No annotation, or one that allows everything."""


@dataclass(frozen=True)
class OneOf:
    """A union, without None, which TOML does not have."""

    forms: tuple["Form", ...]


Form = Plain | Text | Choice | Items | Row | Entries | Record | Made | Anything | OneOf

_SCALARS = (int, float, bool, str, datetime.datetime, datetime.date, datetime.time)
_PATHS = (os.PathLike, pathlib.Path, pathlib.PurePath)
_CONTAINERS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Set: frozenset,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
}
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_TABLES = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def form_of(annotation: Any) -> Form:
    """Return the form of the values that an annotation allows."""
    members = [member for member in _members(annotation) if member is not type(None)]
    forms = [_form_of_member(member) for member in members]
    plain = [form.type for form in forms if isinstance(form, Plain)]
    rest = [form for form in forms if not isinstance(form, Plain)]
    if len(plain) > 1:  # checked together, so that an int of int | float stays an int
        plain = [Union[tuple(plain)]]  # noqa: UP007 - its members are only known at runtime
    if any(part in (int, float) for each in plain for part in _members(each)):
        rest = [Made("schedule", each.annotation) if _is_function(each) else each for each in rest]
    joined = (*map(Plain, plain), *dict.fromkeys(rest))
    return joined[0] if len(joined) == 1 else OneOf(joined)


def alternatives(form: Form) -> tuple[Form, ...]:
    """Return the members of a union; any other form is its only member."""
    return form.forms if isinstance(form, OneOf) else (form,)


def is_expressible(form: Form) -> bool:
    """True if TOML can express a value without naming a function of the user."""
    match form:
        case Made():
            return form.role == "optimizer"
        case Items():
            return is_expressible(form.item)
        case Row():
            return all(map(is_expressible, form.items))
        case Entries():
            return is_expressible(form.value)
        case OneOf():
            return any(map(is_expressible, form.forms))
        case _:
            return True


def show_type(annotation: Any) -> str:
    """Return an annotation as an error message shows it."""
    if inspect.isclass(annotation) and typing.get_origin(annotation) is None:
        return (
            annotation.__qualname__
            if annotation.__module__ == "builtins"
            else _full_name(annotation)
        )
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def _full_name(cls: type) -> str:
    root = cls.__module__.partition(".")[0]
    is_public = not any(part.startswith("_") for part in cls.__module__.split("."))
    return f"{cls.__module__ if is_public else root}.{cls.__qualname__}"


def _form_of_member(member: Any) -> Form:
    origin: Any = typing.get_origin(member) or member
    arguments = typing.get_args(member)
    if origin is Literal or origin in _SCALARS:
        return Plain(member)
    if origin in _PATHS:
        return Text("a path", pathlib.Path)
    if origin is np.dtype:
        return Text("the name of a dtype", jnp.dtype)
    if origin in _TABLES:
        return Entries(
            _key_maker(arguments[0] if arguments else str),
            form_of(arguments[1] if arguments else Any),
        )
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return Row(tuple(map(form_of, arguments)))
    container = next((made for kind, made in _CONTAINERS.items() if kind is origin), None)
    if container is not None:
        return Items(form_of(arguments[0] if arguments else Any), container)
    if _is_callable(origin):
        return Made("schedule" if _is_schedule(member) else "function", member)
    is_class = inspect.isclass(origin) and origin not in (object, Any)
    return _form_of_class(origin, member) if is_class else Anything()


def _form_of_class(cls: type, annotation: Any) -> Form:
    if issubclass(cls, optax.GradientTransformation):
        return Made("optimizer", annotation)
    if issubclass(cls, enum.Enum):
        return Choice(cls)
    return Record(cls) if is_record(cls) else Made("instance", annotation)


def is_record(cls: Any) -> bool:
    """True for a class of named fields, which are the keys of a table."""
    if not inspect.isclass(cls):
        return False
    is_named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    is_model = issubclass(cls, BaseModel) or hasattr(cls, "__attrs_attrs__")
    return dataclasses.is_dataclass(cls) or is_named_tuple or is_model or typing.is_typeddict(cls)


def _key_maker(annotation: Any) -> Callable[[str], Any]:
    return annotation if annotation in (int, float) else str


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union and of unions in it; any other type is its only member."""
    annotation = _bare(annotation)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in typing.get_args(annotation) for inner in _members(member))
    return (annotation,)


def _bare(annotation: Any) -> Any:
    """Return the type inside Annotated, NewType, InitVar, Final or a type alias."""
    if isinstance(annotation, dataclasses.InitVar):
        return _bare(annotation.type)
    if typing.get_origin(annotation) in (
        Annotated,
        typing.Final,
        typing.Required,
        typing.NotRequired,
    ):
        return _bare(typing.get_args(annotation)[0])
    for attribute in ("__supertype__", "__value__"):  # of a NewType, and of `type X = ...`
        if not inspect.isclass(annotation) and hasattr(annotation, attribute):
            return _bare(getattr(annotation, attribute))
    return annotation


def _is_callable(origin: Any) -> bool:
    if not getattr(origin, "_is_protocol", False):
        return origin is collections.abc.Callable
    return any("__call__" in vars(base) for base in origin.__mro__)


def _is_function(form: Form) -> bool:
    return isinstance(form, Made) and form.role == "function"


def _is_schedule(annotation: Any) -> bool:
    """True for the type of a schedule: a function from a step to a number."""
    if annotation in (Schedule, optax.Schedule):
        return True
    arguments = typing.get_args(annotation)
    if len(arguments) != 2 or not isinstance(arguments[0], list) or len(arguments[0]) != 1:
        return False
    return arguments[0][0] in (int, jax.typing.ArrayLike) and arguments[1] in (float, jax.Array)


def check_scalar(form: Form, value: Any) -> Any:
    """Return a converted value; ValueError, with what was expected, if it does not fit."""
    match form:
        case Plain():
            return _plain(form, value)
        case Text():
            if not isinstance(value, str):
                raise ValueError(f"must be {form.noun}, a string")
            try:
                return form.make(value)
            except (TypeError, ValueError):
                raise ValueError(f"must be {form.noun}") from None
        case Choice():
            return _choose(form, value)
        case Items() | Row():
            raise ValueError("must be a valid list")
        case Entries() | Record():
            raise ValueError("must be a table")
        case Made():
            function = 'must name a function, "package.module:name"'
            raise ValueError(function if form.role == "function" else f"must be {describe(form)}")
        case _:
            return value


def _plain(form: Plain, value: Any) -> Any:
    try:
        return TypeAdapter(form.type, config=_STRICT).validate_python(value)
    except ValidationError as error:
        messages = (each["msg"].removeprefix("Input ") for each in error.errors())
        phrases = dict.fromkeys(each.replace("should", "must", 1) for each in messages)
        raise ValueError(" or ".join(phrases)) from None


def _choose(form: Choice, value: Any) -> Any:
    members = form.members.__members__
    if isinstance(value, str) and value in members:
        return members[value]
    for member in members.values():
        if type(member.value) is type(value) and member.value == value:
            return member
    choices = [_show_choice(name, member.value) for name, member in members.items()]
    raise ValueError(f"must be one of {', '.join(choices)}")


def _show_choice(name: str, value: Any) -> str:
    return f"{name} ({value!r})" if isinstance(value, (str, int, float)) and value != name else name


def describe(form: Made) -> str:
    """Return a noun for what only a call can make."""
    if form.role == "instance":
        return f"a {show_type(form.annotation)}, which TOML cannot express"
    return {"optimizer": "an optimizer", "schedule": "a schedule"}.get(form.role, "a function")


def call_hint(form: Any) -> str:
    """Return the end of an error message: how to write what only a call can make."""
    if form.role == "function":
        return ""
    name = {"optimizer": "adam", "schedule": "cosine_decay"}.get(
        form.role, "package.module:function"
    )
    return f'; write a table that calls a function, {{ name = "{name}", ... }}'


def is_number(text: str) -> bool:
    """True for the text of a number."""
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def fits(form: Plain, value: Any) -> bool:
    """True if a form accepts a value."""
    try:
        _plain(form, value)
    except ValueError:
        return False
    return True
