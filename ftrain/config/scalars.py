"""Scalars: single TOML values against the form of an argument, and the words for those that do not fit."""

import math
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ftrain.config.forms import (
    Choice,
    Entries,
    Form,
    Items,
    Made,
    Plain,
    Record,
    Row,
    Text,
    show_type,
)

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check_scalar(form: Form, value: Any) -> Any:
    """The value as the form has it, or a ValueError that says what it should be."""
    match form:
        case Plain():
            return _plain(form, value)
        case Text():
            if not isinstance(value, str):
                raise ValueError(f"should be {form.noun}, a string")
            try:
                return form.make(value)
            except (TypeError, ValueError):
                raise ValueError(f"should be {form.noun}") from None
        case Choice():
            return _choose(form, value)
        case Items() | Row():
            raise ValueError("should be a valid list")
        case Entries() | Record():
            raise ValueError("should be a table")
        case Made():
            function = 'should name a function, "package.module:name"'
            raise ValueError(function if form.role == "function" else f"should be {describe(form)}")
        case _:
            return value


def _plain(form: Plain, value: Any) -> Any:
    try:
        return TypeAdapter(form.type, config=_STRICT).validate_python(value)
    except ValidationError as error:
        phrases = dict.fromkeys(each["msg"].removeprefix("Input ") for each in error.errors())
        raise ValueError(" or ".join(phrases)) from None


def _choose(form: Choice, value: Any) -> Any:
    members = form.members.__members__
    if isinstance(value, str) and value in members:
        return members[value]
    for member in members.values():
        if type(member.value) is type(value) and member.value == value:
            return member
    choices = [_show_choice(name, member.value) for name, member in members.items()]
    raise ValueError(f"should be one of {', '.join(choices)}")


def _show_choice(name: str, value: Any) -> str:
    return f"{name} ({value!r})" if isinstance(value, (str, int, float)) and value != name else name


def describe(form: Made) -> str:
    """What only a call can make, as a noun."""
    if form.role == "instance":
        return f"a {show_type(form.annotation)}, which TOML cannot express"
    return {"optimizer": "an optimizer", "schedule": "a schedule"}.get(form.role, "a function")


def way_out(form: Any) -> str:
    """How a config says what only a call can make, as the end of a sentence."""
    if form.role == "function":
        return ""
    name = {"optimizer": "adam", "schedule": "cosine_decay"}.get(
        form.role, "package.module:function"
    )
    return f'; write a table that calls what makes it, {{ name = "{name}", ... }}'


def is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def fits(form: Plain, value: Any) -> bool:
    try:
        _plain(form, value)
    except ValueError:
        return False
    return True
