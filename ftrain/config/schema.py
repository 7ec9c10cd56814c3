"""The JSON Schema of a config, for editors that complete and check as one types."""

from collections.abc import Callable
from typing import Any

from ftrain.config.kinds import HOOK, OPTIMIZER, SCHEDULE, TASK, Kind
from ftrain.config.plan import HOOKS, SECTIONS, TOP
from ftrain.config.types import Parameter, parameters

Schema = dict[str, Any]
OTHER_NAMES = "[.:]"  # "optax.adamw" and "package.module:name": their arguments are not known here


def json_schema() -> Schema:
    """The schema of every config, made from the signatures of the functions that its tables call."""
    properties = {name: _property(parameter) for name, parameter in parameters(TOP.function).items()}
    properties["task"] = {"anyOf": [{"enum": list(TASK.components())}, {"type": "string", "pattern": OTHER_NAMES}]}
    for name, section in SECTIONS.items():
        properties[name] = _table(section.function, section.given, beside=section.more())
    properties["model"] = {"type": "object"}  # its keys depend on the task; `ftrain check` checks them
    properties["optimizer"] = _component(OPTIMIZER)
    properties[HOOKS] = {"type": "array", "items": _component(HOOK, frozenset({"directory"}))}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ftrain config",
        "$defs": {"schedule": _component(SCHEDULE)},
        "type": "object",
        "properties": properties,
        "required": ["task", "steps", "optimizer", "data"],
        "additionalProperties": False,
    }


def _component(kind: Kind, given: frozenset[str] = frozenset()) -> Schema:
    """Any component of a kind; arguments that may be `given` by the builder can be said, but need not."""
    known = [_table(function, name=name, optional=given) for name, function in kind.components().items()]
    other = {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": OTHER_NAMES}},
        "required": ["name"],
    }
    return {"anyOf": [*known, other]}


def _table(
    function: Callable[..., Any],
    given: frozenset[str] = frozenset(),
    name: str | None = None,
    *,
    beside: dict[str, Parameter] | None = None,
    optional: frozenset[str] = frozenset(),
) -> Schema:
    accepted = parameters(function, given) | (beside or {})
    required = [each.name for each in accepted.values() if each.required and each.name not in optional]
    properties = {each.name: _property(each) for each in accepted.values()}
    if name is not None:
        properties, required = {"name": {"const": name}} | properties, ["name", *required]
    return {
        "type": "object",
        "description": (function.__doc__ or "").strip().partition("\n")[0],
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _property(parameter: Parameter) -> Schema:
    schema: Schema = parameter.adapter().json_schema()
    if parameter.takes_component({}):
        schema = {"anyOf": [schema, {"$ref": "#/$defs/schedule"}]}
    if isinstance(parameter.default, (bool, int, float, str)):
        schema["default"] = parameter.default
    return schema
