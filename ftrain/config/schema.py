"""The JSON Schema of configs: editors use it to complete and check them."""

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
from ftrain.config.functions import (
    HOOK,
    OPTIMIZER,
    SCHEDULE,
    TASK,
    TRANSFORM,
    Kind,
    Parameter,
    parameters,
)
from ftrain.config.load import EXTENDS, LENGTHS
from ftrain.config.plan import HOOKS, SECTIONS, TOP
from ftrain.config.shares import takes_steps_at
from ftrain.optimizers import Group

Schema = dict[str, Any]
OTHER_NAMES = "[.:]"  # "optax.adamw" or "package.module:name", with unknown arguments


def json_schema(task: str | None = None) -> Schema:
    """Return the schema of all configs, from the signatures of the functions that tables call.

    The keys of `[model]` are those of ftrain's own tasks, and of `task`, a "package.module:name".
    """
    tasks = TASK.components() | ({} if task is None else {task: TASK.resolve(task)})
    definitions = _Definitions()
    properties: Schema = {EXTENDS: {"type": "string"}}
    for name, each in parameters(TOP.function).items():
        properties[name] = definitions.property(each)
    properties["task"] = {
        "anyOf": [{"enum": list(tasks)}, {"type": "string", "pattern": OTHER_NAMES}]
    }
    for name, section in SECTIONS.items():
        extra = section.extra_parameters()
        properties[name] = definitions.table(section.function, section.given, extra=extra)
    required = {name: {"required": properties[name].pop("required")} for name in SECTIONS}
    properties["model"] = {"type": "object"}  # its keys depend on the task
    properties["optimizer"] = {"type": "object"}
    hook = definitions.component(HOOK, frozenset({"directory"}))
    properties[HOOKS] = {"type": "array", "items": hook}
    models = [_for_task(name, definitions.table(function)) for name, function in tasks.items()]
    definitions.known["optimizer"] = definitions.optimizer(OPTIMIZER)
    definitions.known["transform"] = definitions.optimizer(TRANSFORM)
    definitions.known["schedule"] = definitions.component(SCHEDULE)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ftrain config",
        "$defs": definitions.known,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "if": {"required": [EXTENDS]},
        "else": {  # a config that extends another may lack any key
            "required": ["task", "optimizer", "data"],
            "oneOf": [{"required": [name]} for name in LENGTHS],
            "properties": required | {"optimizer": {"$ref": "#/$defs/optimizer"}},
            "allOf": models,
        },
    }


class _Definitions:
    """Schemas of functions and forms; those of classes and kinds are defined once."""

    def __init__(self) -> None:
        self.known: dict[str, Schema] = {}

    def component(self, kind: Kind, given: frozenset[str] = frozenset()) -> Schema:
        """Return the schema of a kind's components; arguments that may be `given` are optional."""
        known = [
            self.table(function, name=name, optional=given)
            for name, function in kind.components().items()
        ]
        return {"anyOf": [*known, _OTHER]}

    def optimizer(self, kind: Kind) -> Schema:
        """Return the schema of optimizers: by name, or a chain; with parameter groups."""
        groups = {"type": "array", "items": self._record(Group)}
        known = self.component(kind)["anyOf"]
        for table in known[:-1]:
            table["properties"] |= {"groups": groups}
        transforms = {"type": "array", "items": {"$ref": "#/$defs/transform"}, "minItems": 1}
        chain = {
            "type": "object",
            "properties": {"chain": transforms, "groups": groups},
            "required": ["chain"],
            "additionalProperties": False,
        }
        return {"anyOf": [chain, *known]}

    def table(
        self,
        function: Callable[..., Any],
        given: frozenset[str] = frozenset(),
        name: str | None = None,
        *,
        extra: dict[str, Parameter] | None = None,
        optional: frozenset[str] = frozenset(),
    ) -> Schema:
        """Return the schema of a table that calls `function`."""
        accepted = parameters(function, given) | (extra or {})
        required = [
            each.name for each in accepted.values() if each.required and each.name not in optional
        ]
        properties = {each.name: self.property(each) for each in accepted.values()}
        if name is not None:
            properties = {"name": {"const": name}} | properties
            required = ["name", *required]
        return {
            "type": "object",
            "description": (function.__doc__ or "").strip().partition("\n")[0],
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def property(self, parameter: Parameter) -> Schema:
        """Return the schema of one key, with its default."""
        schema = self._form(parameter.form)
        default = as_toml(parameter.default) if is_toml(parameter.default) else None
        is_scalar = isinstance(default, (bool, int, float, str))
        if takes_steps_at(parameter.name):
            schema = _with_shares(schema)
        return schema | {"default": default} if is_scalar else schema

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
            self.known[name] = {}  # for now, because a class may contain itself
            self.known[name] = self.table(cls)
        return {"$ref": f"#/$defs/{name}"}


def _with_shares(schema: Schema) -> Schema:
    """Return the schema of a number of steps, or of several, each of which may be a share."""
    share = {"type": "string", "pattern": "%$"}
    if schema.get("type") == "array":
        return schema | {"items": {"anyOf": [schema["items"], share]}}
    return {"anyOf": [*schema.get("anyOf", [schema]), share]}


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
