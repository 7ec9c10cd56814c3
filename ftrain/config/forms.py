"""Forms: which TOML values an annotation allows, as a small tree that checks and schemas are made from."""

import collections.abc
import dataclasses
import datetime
import enum
import inspect
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
from pydantic import BaseModel

from ftrain.schedules import Schedule


@dataclass(frozen=True)
class Plain:
    """Values that TOML has itself: numbers, strings, booleans, dates; `type` may be a Literal or a union of these."""

    type: Any


@dataclass(frozen=True)
class Text:
    """A string that becomes something else: a path, a dtype."""

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
    """An array of fixed length, each entry with a form of its own: tuple[int, str]."""

    items: tuple["Form", ...]


@dataclass(frozen=True)
class Entries:
    """A table with keys of the user's choice: dict[str, float]. TOML's keys are strings; `key` makes them."""

    key: Callable[[str], Any]
    value: "Form"


@dataclass(frozen=True)
class Record:
    """A table whose keys are the fields of a class: a dataclass, a NamedTuple, a TypedDict."""

    cls: type


@dataclass(frozen=True)
class Made:
    """What only a call can make, a table with a `name`. A function can also be named by a string."""

    role: Literal["optimizer", "schedule", "function", "instance"]
    annotation: Any

    @property
    def is_function(self) -> bool:
        return self.role in ("schedule", "function")


@dataclass(frozen=True)
class Anything:
    """No annotation, or one that allows all."""


@dataclass(frozen=True)
class OneOf:
    """A union, without None: TOML has no word for it."""

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
_TABLES = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def form_of(annotation: Any) -> Form:
    """The form of the values that an annotation allows."""
    members = [member for member in _members(annotation) if member is not type(None)]
    forms = [_form_of_member(member) for member in members]
    plain = [form.type for form in forms if isinstance(form, Plain)]
    rest = [form for form in forms if not isinstance(form, Plain)]
    if len(plain) > 1:  # one check of all of them keeps an int an int where a float may stand too
        plain = [Union[tuple(plain)]]  # noqa: UP007 - a union of what is only known now
    if any(part in (int, float) for each in plain for part in _members(each)):
        rest = [Made("schedule", each.annotation) if _is_function(each) else each for each in rest]
    joined = (*map(Plain, plain), *dict.fromkeys(rest))
    return joined[0] if len(joined) == 1 else OneOf(joined)


def alternatives(form: Form) -> tuple[Form, ...]:
    """The members of a union; anything else is its only member."""
    return form.forms if isinstance(form, OneOf) else (form,)


def is_sayable(form: Form) -> bool:
    """Whether a config can say such a value without naming a function of its own."""
    match form:
        case Made():
            return form.role == "optimizer"
        case Items():
            return is_sayable(form.item)
        case Row():
            return all(map(is_sayable, form.items))
        case Entries():
            return is_sayable(form.value)
        case OneOf():
            return any(map(is_sayable, form.forms))
        case _:
            return True


def show_type(annotation: Any) -> str:
    """An annotation as an error message shows it."""
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
    """Whether a class is made of named fields, which a table can list."""
    if not inspect.isclass(cls):
        return False
    is_named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    is_model = issubclass(cls, BaseModel) or hasattr(cls, "__attrs_attrs__")
    return dataclasses.is_dataclass(cls) or is_named_tuple or is_model or typing.is_typeddict(cls)


def _key_maker(annotation: Any) -> Callable[[str], Any]:
    return annotation if annotation in (int, float) else str


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, of unions inside it too; anything else is its only member."""
    annotation = _bare(annotation)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in typing.get_args(annotation) for inner in _members(member))
    return (annotation,)


def _bare(annotation: Any) -> Any:
    """An annotation without what only qualifies it: Annotated, NewType, InitVar, Final, a type alias."""
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
    """Whether a type of functions is that of a schedule: a number for the number of a step."""
    if annotation in (Schedule, optax.Schedule):
        return True
    arguments = typing.get_args(annotation)
    if len(arguments) != 2 or not isinstance(arguments[0], list) or len(arguments[0]) != 1:
        return False
    return arguments[0][0] in (int, jax.typing.ArrayLike) and arguments[1] in (float, jax.Array)
