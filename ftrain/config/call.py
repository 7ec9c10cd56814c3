"""Calls: functions with checked arguments, to be called or written as TOML."""

import datetime
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ftrain.config.functions import TIMING, Kind, as_positional, takes_trigger
from ftrain.config.load import Config, ConfigError, Table
from ftrain.formats import DamagedRecordError, SpecError
from ftrain.training import at, every, first

# Errors whose messages already name the place of the mistake.
_COMPLETE_ERRORS = (ConfigError, DamagedRecordError, SpecError)


@dataclass(frozen=True)
class Call:
    """A function with checked arguments, some of which may be calls."""

    key: str  # the table's dotted name
    function: Callable[..., Any]
    arguments: Table
    config: Config = field(repr=False)
    kind: Kind | None = None  # what the function must return, if the config chose it
    name: str | None = None  # of the function, if the table has a key `name`
    extra: frozenset[str] = frozenset()  # keys of the table that are not arguments

    def make(self, **given: Any) -> Any:
        """Call the function; any exception becomes a ConfigError."""
        arguments = {
            name: _made(value) for name, value in self.arguments.items() if name not in self.extra
        }
        try:
            timed = _join_timing(arguments) if takes_trigger(self.function) else arguments
            positional, named = as_positional(self.function, timed)
            made = self.function(*positional, **named, **given)
            made = made if self.kind is None else self.kind.adapt(made)
        except _COMPLETE_ERRORS:
            raise
        except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
            raise self._refused(" ".join(str(error).split())) from error
        except Exception as error:
            message = f"fails: {type(error).__name__}: {error}"
            raise self._refused(" ".join(message.split())) from error
        if self.kind is not None and not self.kind.is_made(made):
            called = getattr(self.function, "__qualname__", self.name)
            raise self._refused(f"{called} must return {self.kind.noun}, got {made!r:.60}")
        return made

    def resolved(self) -> Table:
        """Return the table in full, defaults included."""
        named = {} if self.name is None else {"name": self.name}
        return named | {name: as_toml(value) for name, value in self.arguments.items()}

    def nested(self) -> list["Call"]:
        """Return the calls among the arguments, in arrays and tables too."""
        return _calls_in(list(self.arguments.values()))

    def every(self) -> Iterator["Call"]:
        """Yield this call, and all calls in its arguments, at any depth."""
        yield self
        for nested in self.nested():
            yield from nested.every()

    def _refused(self, message: str) -> ConfigError:
        blamed = next((name for name in self.arguments if name in message.split()), None)
        origin = self.config.origin(f"{self.key}.{blamed}") if blamed else self.config.path
        return ConfigError(f"{origin}: [{self.key}] {message}")


@dataclass(frozen=True)
class GroupedCall(Call):
    """The call of `groups` with an optimizer whose table has the groups too."""

    def resolved(self) -> Table:
        """Return the table of the optimizer, with its groups."""
        groups = as_toml(self.arguments["groups"])
        return self.arguments["optimizer"].resolved() | {"groups": groups}


@dataclass(frozen=True)
class Named:
    """A function that a config names and that is an argument itself."""

    name: str
    function: Callable[..., Any] = field(repr=False)

    def make(self) -> Callable[..., Any]:
        """Return the function."""
        return self.function


@dataclass(frozen=True)
class Default:
    """A default that is an object, with the table that would make it."""

    value: Any
    table: Call

    def make(self) -> Any:
        """Return the default."""
        return self.value


def as_toml(value: Any) -> Any:
    """Return a checked argument as a TOML value."""
    match value:
        case Call():
            return value.resolved()
        case Default():
            return value.table.resolved()
        case Named():
            return value.name
        case enum.Enum():
            return value.name
        case dict():
            return {str(key): as_toml(each) for key, each in value.items()}
        case list() | tuple():
            return [as_toml(each) for each in value]
        case set() | frozenset():
            return sorted(map(as_toml, value), key=repr)
        case Path() | np.dtype():
            return str(value)
        case _:
            return value


def is_toml(value: Any) -> bool:
    """True for a value that TOML can express."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return not hasattr(value, "_fields") and all(map(is_toml, value))
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_toml(each) for key, each in value.items())
    return isinstance(value, (bool, int, float, str, Path, enum.Enum, datetime.date, datetime.time))


def _made(value: Any) -> Any:
    if isinstance(value, (Call, Named, Default)):
        return value.make()
    if isinstance(value, dict):
        return {key: _made(each) for key, each in value.items()}
    is_array = type(value) in (list, tuple, set, frozenset)
    return type(value)(map(_made, value)) if is_array else value


def _calls_in(value: Any) -> list[Call]:
    if isinstance(value, Call):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [found for each in value for found in _calls_in(each)]


def _join_timing(arguments: Table) -> Table:
    """Replace the keys of timing by the trigger `when`."""
    steps, secs, chosen, count = (arguments.get(name) for name in TIMING)
    rest = {name: value for name, value in arguments.items() if name not in TIMING}
    ways = [
        None if steps is None and secs is None else every(steps=steps, secs=secs),
        None if chosen is None else at(*chosen),
        None if count is None else first(count),
    ]
    triggers = [trigger for trigger in ways if trigger is not None]
    if len(triggers) > 1:
        raise ValueError(
            "has two kinds of timing: use every_steps and every_secs, or at_steps, or first_steps"
        )
    return rest | {"when": triggers[0]} if triggers else rest
