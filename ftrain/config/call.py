"""Calls: a function that a config names, with arguments checked against its signature."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftrain.config.kinds import SCHEDULE, Kind, find, suggest
from ftrain.config.load import Config, ConfigError, Table
from ftrain.config.types import TIMING, Parameter, parameters, takes_trigger
from ftrain.training import at, every, first


@dataclass(frozen=True)
class Call:
    """A function with checked arguments; some of them may be calls themselves."""

    key: str  # the table's dotted name
    function: Callable[..., Any]
    arguments: Table
    config: Config = field(repr=False)
    kind: Kind | None = None  # what the function must make, if the config chose it
    name: str | None = None  # of the function, if the table itself says it
    beside: frozenset[str] = frozenset()  # keys of the table that are not for this function

    def make(self, **given: Any) -> Any:
        """Call the function; a value that it refuses is a ConfigError."""
        arguments = {name: _made(value) for name, value in self.arguments.items() if name not in self.beside}
        try:
            timed = _join_timing(arguments) if takes_trigger(self.function) else arguments
            made = self.function(**timed, **given)
        except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
            raise self._refused(" ".join(str(error).split())) from error
        if self.kind is not None and not self.kind.is_made(made):
            raise self._refused(f"{self.function.__qualname__} should make {self.kind.noun}, it made {made!r:.60}")
        return made

    def resolved(self) -> Table:
        """The table as it would be written out in full, defaults included."""
        named = {} if self.name is None else {"name": self.name}
        return named | {name: _as_toml(value) for name, value in self.arguments.items()}

    def _refused(self, message: str) -> ConfigError:
        blamed = next((name for name in self.arguments if name in message.split()), None)
        origin = self.config.origin(f"{self.key}.{blamed}") if blamed else self.config.path
        return ConfigError(f"{origin}: [{self.key}] {message}")


@dataclass(frozen=True)
class Named:
    """A function that a config names to be handed over as it is."""

    name: str
    function: Callable[..., Any] = field(repr=False)

    def make(self) -> Callable[..., Any]:
        return self.function


def named(name: str, key: str, config: Config) -> Named:
    """The function that "package.module:name" stands for."""
    try:
        return Named(name, find(name))
    except LookupError as error:
        raise config.error(key, str(error)) from error


def call(
    key: str,
    function: Callable[..., Any],
    table: Table,
    config: Config,
    *,
    given: frozenset[str] = frozenset(),
    kind: Kind | None = None,
    name: str | None = None,
    beside: dict[str, Parameter] | None = None,
) -> Call:
    """A checked call of `function` with the keys of a table; keys `beside` its arguments are only checked and kept."""
    accepted = parameters(function, given) | (beside or {})
    arguments = check_table(key, accepted, table, config)
    return Call(key, function, arguments, config, kind, name, frozenset(beside or {}))


def component(key: str, kind: Kind, table: Table, config: Config, *, given: frozenset[str] = frozenset()) -> Call:
    """A checked call of the function that a table names; `given` are arguments that the builder adds if they miss."""
    if not isinstance(table.get("name"), str):
        raise config.error(f"{key}.name", f"is missing; name one of {', '.join(kind.components())}")
    function = resolve(kind, table["name"], f"{key}.name", config)
    arguments = {name: value for name, value in table.items() if name != "name"}
    return call(key, function, arguments, config, kind=kind, name=table["name"], given=given - arguments.keys())


def resolve(kind: Kind, name: str, key: str, config: Config) -> Callable[..., Any]:
    try:
        return kind.resolve(name)
    except LookupError as error:
        raise config.error(key, str(error)) from error.__cause__  # what an import of the user's own raised, say


def check_table(
    key: str, accepted: dict[str, Parameter], table: Table, config: Config, *, more: tuple[str, ...] = ()
) -> Table:
    """The arguments of a call: those in the table, checked, and the defaults of the others."""
    prefix = f"{key}." if key else ""
    for name in table:
        if name not in accepted:
            way_out = _replace_hint(key, name, config) or suggest(name, [*accepted, *more])
            raise config.error(prefix + name, f"there is no such key{way_out}")
    for parameter in accepted.values():
        if parameter.required and parameter.name not in table:
            raise config.error(prefix + parameter.name, "is missing, and it has no default")
    checked = {name: _check_value(prefix + name, accepted[name], value, config) for name, value in table.items()}
    filled = _defaults(accepted, checked) | checked
    return {name: filled[name] for name in accepted if name in filled}  # in the order of the signature


def _check_value(key: str, parameter: Parameter, value: Any, config: Config) -> Any:
    if isinstance(value, str) and ":" in value and parameter.takes_function:
        return named(value, key, config)
    if parameter.takes_function and not parameter.is_plain and not isinstance(value, dict):
        raise config.error(key, f'should name a function, "package.module:name", got {value!r}')
    if isinstance(value, dict) and parameter.takes_component(value):
        return component(key, SCHEDULE, value, config)
    try:
        return parameter.check(value)
    except ValueError as error:
        raise config.error(key, str(error)) from None


def _replace_hint(key: str, name: str, config: Config) -> str:
    """What to do when the command line names another function and the file's arguments do not fit it."""
    if f"{key}.name" not in config.overridden or config.origin(f"{key}.{name}") == "command line":
        return ""
    chosen = config.values[key]["name"] if isinstance(config.values.get(key), dict) else "..."
    return f" of {chosen}; to replace the whole table: {key}='{{name=\"{chosen}\", ...}}'"


def _defaults(accepted: dict[str, Parameter], chosen: Table) -> Table:
    return {
        name: parameter.default
        for name, parameter in accepted.items()
        # Only what TOML can say; and one way of timing that is chosen switches the other's default off.
        if _is_sayable(parameter.default) and not (name in TIMING and TIMING.keys() & chosen.keys())
    }


def _is_sayable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_sayable, value))
    return isinstance(value, (bool, int, float, str, Path))


def _as_toml(value: Any) -> Any:
    if isinstance(value, Call):
        return value.resolved()
    if isinstance(value, Named):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_as_toml(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _join_timing(arguments: Table) -> Table:
    steps, secs, chosen, count = (arguments.get(name) for name in TIMING)
    rest = {name: value for name, value in arguments.items() if name not in TIMING}
    ways = [
        None if steps is None and secs is None else every(steps=steps, secs=secs),
        None if chosen is None else at(*chosen),
        None if count is None else first(count),
    ]
    triggers = [trigger for trigger in ways if trigger is not None]
    if len(triggers) > 1:
        raise ValueError("says when in two ways: use every_steps and every_secs, or at_steps, or first_steps")
    return rest | {"when": triggers[0]} if triggers else rest


def _made(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_made, value))
    return value.make() if isinstance(value, (Call, Named)) else value
