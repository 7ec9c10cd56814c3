"""Checking: tables of a config against the signatures of the functions that they call."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from ftrain.config.call import Call, Default, GroupedCall, Named, as_toml, is_toml
from ftrain.config.forms import (
    Anything,
    Choice,
    Entries,
    Form,
    Items,
    Made,
    Plain,
    Record,
    Row,
    Text,
    alternatives,
    call_hint,
    check_scalar,
    describe,
    fits,
    is_number,
)
from ftrain.config.functions import (
    OPTIMIZER,
    TIMING,
    TRANSFORM,
    UNKNOWN,
    Kind,
    Parameter,
    find,
    instances_of,
    kind_of,
    parameters,
    suggest_or_list,
)
from ftrain.config.load import Config, ConfigError, Table
from ftrain.config.transforms import with_schedules
from ftrain.optimizers import Group, groups

MAX_DEPTH = 32  # of nested tables


def call(
    key: str,
    function: Callable[..., Any],
    table: Table,
    config: Config,
    *,
    given: frozenset[str] = frozenset(),
    kind: Kind | None = None,
    name: str | None = None,
    extra: dict[str, Parameter] | None = None,
) -> Call:
    """Return a checked call of `function` with the keys of a table.

    `given` are arguments that the builder adds. Keys in `extra` are not arguments:
    they are only checked and kept.
    """
    if key.count(".") > MAX_DEPTH:
        raise config.error(key, f"is nested in more than {MAX_DEPTH} tables")
    accepted = parameters(function, given) | (extra or {})
    arguments = check_table(key, accepted, table, config)
    return Call(key, function, arguments, config, kind, name, frozenset(extra or {}))


def component(
    key: str, kind: Kind, table: Table, config: Config, *, given: frozenset[str] = frozenset()
) -> Call:
    """Return a checked call of the function that a table names.

    `given` are arguments that the builder adds if they are missing. A table of an optimizer may
    also have `groups`, and `chain` instead of a name.
    """
    if kind in (OPTIMIZER, TRANSFORM) and "groups" in table:
        return _grouped(key, kind, table, config)
    if kind in (OPTIMIZER, TRANSFORM) and "chain" in table and "name" not in table:
        return _chain(key, kind, table, config)
    name = table.get("name")
    if not isinstance(name, str) or not name:
        known = ", ".join(kind.components())
        hint = f"name one of {known}" if known else 'write name = "package.module:function"'
        wrong = f"must be the name of a function, got {name!r:.60}"
        raise config.error(f"{key}.name", f"{'is missing' if name is None else wrong}; {hint}")
    function = resolve(kind, name, f"{key}.name", config)
    if kind in (OPTIMIZER, TRANSFORM) and "chain" in table.keys() - parameters(function).keys():
        raise config.error(
            f"{key}.chain",
            f"an optimizer has a name or a chain, this one is named {name!r}; "
            f"to replace it: {key}='{{chain = [...]}}'",
        )
    arguments = {name: value for name, value in table.items() if name != "name"}
    if kind in (OPTIMIZER, TRANSFORM) and name.startswith("optax."):
        known = parameters(function)
        scheduled = [
            each for each, value in arguments.items() if _is_scheduled(known.get(each), value)
        ]
        function = with_schedules(function, scheduled) if scheduled else function
    return call(
        key, function, arguments, config, kind=kind, name=name, given=given - arguments.keys()
    )


def _is_scheduled(parameter: Parameter | None, value: Any) -> bool:
    """True for a table of a schedule, for an argument that is only a number."""
    if parameter is None or not isinstance(value, dict) or "name" not in value:
        return False
    forms = alternatives(parameter.form)
    made = [form for form in forms if isinstance(form, Made) and form.role != "instance"]
    others = [form for form in forms if isinstance(form, (Anything, Record, Entries))]
    takes_number = any(isinstance(form, Plain) and fits(form, 0.5) for form in forms)
    return takes_number and not made and not others


def _grouped(key: str, kind: Kind, table: Table, config: Config) -> Call:
    """Return the call of an optimizer with parameter groups."""
    rest = {name: value for name, value in table.items() if name != "groups"}
    optimizer = component(key, kind, rest, config)
    tables = _tables(f"{key}.groups", table["groups"], config)
    if not tables:
        return optimizer
    members = [
        call(f"{key}.groups.{number}", Group, each, config) for number, each in enumerate(tables)
    ]
    return GroupedCall(key, groups, {"optimizer": optimizer, "groups": members}, config, kind)


def _chain(key: str, kind: Kind, table: Table, config: Config) -> Call:
    """Return the call of a chain of transforms."""
    for name in table:
        if name != "chain":
            raise config.error(
                f"{key}.{name}", "unknown key beside chain; it belongs to an entry of the chain"
            )
    tables = _tables(f"{key}.chain", table["chain"], config)
    if not tables:
        raise config.error(f"{key}.chain", "must have at least one entry")
    entries = [
        component(f"{key}.chain.{number}", TRANSFORM, each, config)
        for number, each in enumerate(tables)
    ]
    return Call(key, _make_chain, {"chain": entries}, config, kind)


def _make_chain(chain: list[optax.GradientTransformation]) -> optax.GradientTransformation:
    return optax.chain(*chain)


def _tables(key: str, value: Any, config: Config) -> list[Table]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise config.error(key, f"must be tables, [[{key}]], got {value!r:.200}")
    return value


def resolve(kind: Kind, name: str, key: str, config: Config) -> Callable[..., Any]:
    """Return the function of a kind that `key` names."""
    try:
        return kind.resolve(name)
    except LookupError as error:  # its cause may be an error in the user's module
        raise config.error(key, str(error)) from error.__cause__


def named(name: str, key: str, config: Config) -> Named:
    """Return the function named "package.module:name"."""
    try:
        return Named(name, find(name))
    except LookupError as error:
        raise config.error(key, str(error)) from error.__cause__


def check_table(
    key: str,
    accepted: dict[str, Parameter],
    table: Table,
    config: Config,
    *,
    more: tuple[str, ...] = (),
) -> Table:
    """Return the arguments of a call: those in the table, checked, and defaults of the others.

    `more` are other keys that exist beside `accepted`, for suggestions.
    """
    prefix = f"{key}." if key else ""
    for name in table:
        if name not in accepted:
            hint = _replace_hint(key, name, config) or suggest_or_list(name, [*accepted, *more])
            raise config.error(prefix + name, f"unknown key{hint}")
    for parameter in accepted.values():
        if parameter.required and parameter.name not in table:
            raise config.error(
                prefix + parameter.name, f"is missing, and it has no default{_only_made(parameter)}"
            )
    checked = {
        name: _argument(prefix + name, accepted[name], value, config)
        for name, value in table.items()
    }
    filled = _defaults(prefix, accepted, checked, config) | checked
    # In the order of the signature.
    return {name: filled[name] for name in accepted if name in filled}


def _argument(key: str, parameter: Parameter, value: Any, config: Config) -> Any:
    default = parameter.default
    # A default, such as infinity, need not fit its own annotation.
    if is_toml(default) and repr(as_toml(default)) == repr(value):
        return default
    if isinstance(value, dict) and "name" not in value and _is_record(parameter.form, default):
        return _fields(key, default, value, config)
    return check(key, parameter.form, value, config)


def check(key: str, form: Form, value: Any, config: Config) -> Any:
    """Return a checked TOML value, with a Call for each table that names a function."""
    forms = alternatives(form)
    if isinstance(value, dict):
        return _check_of_table(key, forms, value, config)
    if isinstance(value, str) and (function := _function_name(forms, value)):
        return named(function, key, config)
    if isinstance(value, list):
        arrays = [each for each in forms if isinstance(each, (Items, Row))]
        if arrays:
            return _first_fit(key, arrays, value, config)
    return _check_scalar(key, forms, value, config)


def _check_of_table(key: str, forms: tuple[Form, ...], value: Table, config: Config) -> Any:
    calls = [each for each in forms if isinstance(each, Made)]
    tables = [each for each in forms if isinstance(each, (Record, Entries))]
    functions = [each for each in calls if each.role != "instance"]
    has_function_name = isinstance(value.get("name"), str)
    has_anything = Anything() in forms
    if tables and (
        not has_function_name
        or any(_has_name(each) for each in tables)
        or not (functions or has_anything)
    ):
        return _first_fit(key, tables, value, config)
    if has_anything:
        return component(key, UNKNOWN, value, config) if has_function_name else value
    if functions or (calls and has_function_name):
        return component(key, kind_of((functions or calls)[0]), value, config)
    return _check_scalar(key, forms, value, config)


def _first_fit(key: str, forms: list[Any], value: Any, config: Config) -> Any:
    """Return the value checked by the first form that it fits; else raise the first error."""
    errors: list[ConfigError] = []
    for form in sorted(forms, key=lambda each: -_shared_keys(each, value)):
        try:
            return _check_inside(key, form, value, config)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _check_inside(
    key: str, form: Items | Row | Record | Entries, value: Any, config: Config
) -> Any:
    match form:
        case Items():
            checked = [
                check(f"{key}.{number}", form.item, each, config)
                for number, each in enumerate(value)
            ]
            try:
                return form.container(checked)
            except TypeError as error:  # a set of unhashable values
                raise config.error(key, str(error)) from None
        case Row():
            if len(value) != len(form.items):
                raise config.error(key, f"must have {len(form.items)} entries, got {value!r:.200}")
            return tuple(
                check(f"{key}.{n}", each, value[n], config) for n, each in enumerate(form.items)
            )
        case Entries():
            return {
                _entry_key(key, form, name, config): check(
                    f"{key}.{name}", form.value, each, config
                )
                for name, each in value.items()
            }
        case Record():
            name = value.get("name")
            if isinstance(name, str) and (":" in name or "." in name) and not _has_name(form):
                return component(key, instances_of(form.cls), value, config)
            return call(key, form.cls, value, config)


def _entry_key(key: str, form: Entries, name: str, config: Config) -> Any:
    try:
        return form.key(name)
    except ValueError:
        raise config.error(f"{key}.{name}", f"its keys must be numbers, got {name!r}") from None


def _check_scalar(key: str, forms: tuple[Form, ...], value: Any, config: Config) -> Any:
    """Return the value checked by the first form that it fits; else raise what all expect."""
    phrases: dict[str, None] = {}
    others = [each for each in forms if not isinstance(each, Made)]
    for form in others or forms:
        try:
            return check_scalar(form, value)
        except ValueError as error:
            phrases[str(error)] = None
    hint = "" if others else call_hint(forms[0])
    raise config.error(key, f"{' or '.join(phrases)}, got {value!r:.200}{hint}")


def _only_made(parameter: Parameter) -> str:
    """Return the end of an error message: how to write an argument that only a call can make."""
    forms = alternatives(parameter.form)
    if not all(isinstance(form, Made) for form in forms):
        return ""
    made = next(form for form in forms if isinstance(form, Made))
    return f"; it is {describe(made)}{call_hint(made)}"


def _function_name(forms: tuple[Form, ...], value: str) -> str | None:
    """Return a string if it names a function and a form accepts one."""
    if not any(isinstance(form, Made) and form.is_function for form in forms):
        return None
    takes_text = any(isinstance(form, (Text, Choice, Anything)) for form in forms)
    takes_text = takes_text or any(isinstance(form, Plain) and fits(form, value) for form in forms)
    is_dotted = "." in value and not takes_text and not is_number(value)
    return value if ":" in value or is_dotted else None


def _has_name(form: Record | Entries) -> bool:
    """True if `name` is a field of the class, not the name of a function."""
    return isinstance(form, Record) and "name" in parameters(form.cls)


def _shared_keys(form: Any, value: Any) -> int:
    return len(parameters(form.cls).keys() & value.keys()) if isinstance(form, Record) else 0


def _is_record(form: Form, default: Any) -> bool:
    """True if a table changes fields of a default that is a dataclass or a NamedTuple."""
    is_instance = dataclasses.is_dataclass(default) or hasattr(default, "_replace")
    if not is_instance or isinstance(default, type):
        return False
    return any(
        isinstance(each, Record) and isinstance(default, each.cls) for each in alternatives(form)
    )


def _fields(key: str, default: Any, table: Table, config: Config) -> Call:
    """Return a call that copies a default with some fields changed."""
    is_dataclass = dataclasses.is_dataclass(default)

    def replace(**fields: Any) -> Any:
        if is_dataclass:
            return dataclasses.replace(default, **fields)
        return default._replace(**fields)

    accepted = {
        name: dataclasses.replace(each, default=getattr(default, name, each.default))
        for name, each in parameters(type(default)).items()
    }
    return Call(key, replace, check_table(key, accepted, table, config), config)


def _replace_hint(key: str, name: str, config: Config) -> str:
    """Return a hint if the command line names another function than the file does."""
    if f"{key}.name" not in config.overridden or config.origin(f"{key}.{name}") == "command line":
        return ""
    chosen = config.values[key]["name"] if isinstance(config.values.get(key), dict) else "..."
    return f" of {chosen}; to replace the whole table: {key}='{{name=\"{chosen}\", ...}}'"


def _defaults(prefix: str, accepted: dict[str, Parameter], chosen: Table, config: Config) -> Table:
    """Return the defaults that TOML can express; a chosen timing replaces the default one."""
    is_timed = bool(TIMING.keys() & chosen.keys())
    found: Table = {}
    for name, parameter in accepted.items():
        if name in chosen or (name in TIMING and is_timed):
            continue
        if is_toml(parameter.default):
            found[name] = parameter.default
        elif _is_record(parameter.form, parameter.default):
            with contextlib.suppress(ConfigError):  # no table can make this default
                found[name] = Default(
                    parameter.default, _fields(prefix + name, parameter.default, {}, config)
                )
    return found
