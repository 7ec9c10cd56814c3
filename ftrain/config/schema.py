"""The JSON Schema of a config, for editors that complete and check as one types."""

from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from ftrain.config.call import as_toml, is_toml
from ftrain.config.forms import (
    Anything,
    Choice,
    Entries,
    Form,
    Items,
    Made,
    OneOf,
    Plain,
    Record,
    Row,
    Text,
)
from ftrain.config.kinds import HOOK, OPTIMIZER, SCHEDULE, TASK, Kind
from ftrain.config.plan import HOOKS, SECTIONS, TOP
from ftrain.config.types import Parameter, parameters

Schema = dict[str, Any]
OTHER_NAMES = "[.:]"  # "optax.adamw" and "package.module:name": their arguments are not known here


def json_schema(task: str | None = None) -> Schema:
    """The schema of every config, made from the signatures of the functions that its tables call.

    The keys of `[model]` are those of ftrain's own tasks, and of `task`, a "package.module:name".
    """
    tasks = TASK.components() | ({} if task is None else {task: TASK.resolve(task)})
    definitions = _Definitions()
    properties = {
        name: definitions.property(each) for name, each in parameters(TOP.function).items()
    }
    properties["task"] = {
        "anyOf": [{"enum": list(tasks)}, {"type": "string", "pattern": OTHER_NAMES}]
    }
    for name, section in SECTIONS.items():
        properties[name] = definitions.table(section.function, section.given, beside=section.more())
    properties["model"] = {"type": "object"}  # its keys depend on the task
    properties["optimizer"] = {"$ref": "#/$defs/optimizer"}
    hook = definitions.component(HOOK, frozenset({"directory"}))
    properties[HOOKS] = {"type": "array", "items": hook}
    models = [_for_task(name, definitions.table(function)) for name, function in tasks.items()]
    definitions.known["optimizer"] = definitions.component(OPTIMIZER)
    definitions.known["schedule"] = definitions.component(SCHEDULE)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ftrain config",
        "$defs": definitions.known,
        "type": "object",
        "properties": properties,
        "required": ["task", "steps", "optimizer", "data"],
        "additionalProperties": False,
        "allOf": models,
    }


class _Definitions:
    """Schemas of functions and forms; classes and kinds of components are described once, and referred to."""

    def __init__(self) -> None:
        self.known: dict[str, Schema] = {}

    def component(self, kind: Kind, given: frozenset[str] = frozenset()) -> Schema:
        """Any component of a kind; arguments that may be `given` by the builder can be said, but need not."""
        known = [
            self.table(function, name=name, optional=given)
            for name, function in kind.components().items()
        ]
        return {"anyOf": [*known, _OTHER]}

    def table(
        self,
        function: Callable[..., Any],
        given: frozenset[str] = frozenset(),
        name: str | None = None,
        *,
        beside: dict[str, Parameter] | None = None,
        optional: frozenset[str] = frozenset(),
    ) -> Schema:
        accepted = parameters(function, given) | (beside or {})
        required = [
            each.name for each in accepted.values() if each.required and each.name not in optional
        ]
        properties = {each.name: self.property(each) for each in accepted.values()}
        if name is not None:
            properties, required = {"name": {"const": name}} | properties, ["name", *required]
        return {
            "type": "object",
            "description": (function.__doc__ or "").strip().partition("\n")[0],
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def property(self, parameter: Parameter) -> Schema:
        schema = self._form(parameter.form)
        default = as_toml(parameter.default) if is_toml(parameter.default) else None
        return (
            schema | {"default": default}
            if isinstance(default, (bool, int, float, str))
            else schema
        )

    def _form(self, form: Form) -> Schema:
        match form:
            case Plain():
                return TypeAdapter(form.type).json_schema()
            case Text():
                return {"type": "string"}
            case Choice():
                members = form.members.__members__
                values = [member.value for member in members.values() if is_toml(member.value)]
                return {"enum": list(dict.fromkeys([*members, *map(as_toml, values)]))}
            case Items():
                return {"type": "array", "items": self._form(form.item)}
            case Row():
                count = len(form.items)
                each = [self._form(item) for item in form.items]
                return {"type": "array", "prefixItems": each, "minItems": count, "maxItems": count}
            case Entries():
                return {"type": "object", "additionalProperties": self._form(form.value)}
            case Record():
                return {"anyOf": [self._record(form.cls), _OTHER]}
            case Made():
                return _made(form)
            case OneOf():
                return {"anyOf": [self._form(each) for each in form.forms]}
            case Anything():
                return {}

    def _record(self, cls: type) -> Schema:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name not in self.known:
            self.known[name] = {}  # while it is described, for a class that has itself inside
            self.known[name] = self.table(cls)
        return {"$ref": f"#/$defs/{name}"}


_OTHER = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": OTHER_NAMES}},
    "required": ["name"],
}


def _made(form: Made) -> Schema:
    match form.role:
        case "optimizer":
            return {"$ref": "#/$defs/optimizer"}
        case "schedule":
            return {
                "anyOf": [{"$ref": "#/$defs/schedule"}, {"type": "string", "pattern": OTHER_NAMES}]
            }
        case "function":
            return {"anyOf": [{"type": "string", "pattern": OTHER_NAMES}, _OTHER]}
        case "instance":
            return _OTHER


def _for_task(name: str, model: Schema) -> Schema:
    chosen = {"properties": {"task": {"const": name}}, "required": ["task"]}
    return {"if": chosen, "then": {"properties": {"model": model}}}
