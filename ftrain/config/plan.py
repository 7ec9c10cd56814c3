"""The plan of a job: every function that a config calls, with its arguments checked, and nothing called yet."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optax

from ftrain import optimizers, schedules, tasks
from ftrain.cluster import make_mesh
from ftrain.config.load import Config, ConfigError, Table
from ftrain.config.names import Kind, suggest
from ftrain.config.types import Parameter, parameters
from ftrain.data import Pipeline
from ftrain.hooks import CheckpointSaver, Evaluator, Logging, SummarySaver
from ftrain.training import every, make_step

TASK = Kind(tasks, tasks.Task)
OPTIMIZER = Kind(optimizers, optax.GradientTransformation)
SCHEDULE = Kind(schedules, schedules.Schedule)


@dataclass(frozen=True)
class Section:
    """A table of a config that always calls the same function; `given` are the arguments that the builder adds."""

    function: Callable[..., Any]
    given: frozenset[str] = frozenset()


def _top(task: str, steps: int, seed: int = 0) -> None:
    """The keys that stand above all tables."""


def _run(directory: str = "") -> None:
    """The table `run`."""


SECTIONS = {
    "run": Section(_run),
    "data": Section(Pipeline, frozenset({"source", "seed", "shard_index", "shard_count"})),
    "step": Section(make_step, frozenset({"loss_fn", "optimizer", "with_model_state", "learning_rate"})),
    "mesh": Section(make_mesh),
    "checkpoint": Section(CheckpointSaver, frozenset({"directory"})),
    "summary": Section(SummarySaver, frozenset({"directory"})),
    "log": Section(Logging, frozenset({"write"})),
    "evaluation": Section(Evaluator, frozenset({"evaluate"})),
}
TOP = Section(_top)
NAMED = ("model", "optimizer")  # tables whose function the config names


@dataclass(frozen=True)
class Call:
    """A function with checked arguments; some of them may be calls themselves."""

    key: str  # the table's dotted name
    function: Callable[..., Any]
    arguments: Table
    config: Config = field(repr=False)
    name: str | None = None  # as the config names the function, if it does

    def make(self, **given: Any) -> Any:
        """Call the function; a value that it refuses is a ConfigError."""
        arguments = {name: value.make() if isinstance(value, Call) else value for name, value in self.arguments.items()}
        try:
            return self.function(**_join_triggers(arguments), **given)
        except (ValueError, ModuleNotFoundError) as error:
            raise self._refused(str(error)) from error

    def _refused(self, message: str) -> ConfigError:
        blamed = next((name for name in self.arguments if name in message.split()), None)
        origin = self.config.origin(f"{self.key}.{blamed}") if blamed else self.config.path
        return ConfigError(f"{origin}: [{self.key}] {message}")

    def resolved(self) -> Table:
        """The table as it would be written out in full, defaults included."""
        named = {} if self.name is None else {"name": self.name}
        return named | {name: v.resolved() if isinstance(v, Call) else v for name, v in self.arguments.items()}


@dataclass(frozen=True)
class Plan:
    config: Config
    top: Table
    calls: dict[str, Call]

    def resolved(self) -> Table:
        """The whole config as it would be written out in full, defaults included."""
        return self.top | {name: call.resolved() for name, call in self.calls.items()}


def plan(config: Config) -> Plan:
    """Check a whole config against the signatures of the functions it calls."""
    tables = {name: value for name, value in config.values.items() if name in SECTIONS or name in NAMED}
    for name, value in tables.items():
        if not isinstance(value, dict):
            raise config.error(name, f"should be a table, [{name}], got {value!r}")
    rest = {name: value for name, value in config.values.items() if name not in tables}
    top = _check("", parameters(TOP.function), rest, config, more=[*SECTIONS, *NAMED])
    if top["steps"] < 1:
        raise config.error("steps", f"should be at least 1, got {top['steps']}")
    if top["seed"] < 0:
        raise config.error("seed", f"should be at least 0, got {top['seed']}")
    calls = {
        "model": _call("model", _resolve(TASK, top["task"], "task", config), tables.get("model", {}), config),
        "optimizer": _component("optimizer", OPTIMIZER, tables.get("optimizer", {}), config),
    }
    for name, section in SECTIONS.items():
        calls[name] = _call(name, section.function, tables.get(name, {}), config, section.given)
    if not calls["run"].arguments["directory"]:
        calls["run"].arguments["directory"] = f"runs/{config.path.stem}"
    return Plan(config, top, calls)


def _component(key: str, kind: Kind, table: Table, config: Config) -> Call:
    """A table that names the function it calls."""
    if not isinstance(table.get("name"), str):
        raise config.error(f"{key}.name", f"is missing; name one of {', '.join(kind.components())}")
    function = _resolve(kind, table["name"], f"{key}.name", config)
    arguments = {name: value for name, value in table.items() if name != "name"}
    return _call(key, function, arguments, config, name=table["name"])


def _resolve(kind: Kind, name: str, key: str, config: Config) -> Callable[..., Any]:
    try:
        return kind.resolve(name)
    except LookupError as error:
        raise config.error(key, str(error)) from error


def _call(
    key: str,
    function: Callable[..., Any],
    table: Table,
    config: Config,
    given: frozenset[str] = frozenset(),
    name: str | None = None,
) -> Call:
    return Call(key, function, _check(key, parameters(function, given), table, config), config, name)


def _check(
    key: str, accepted: dict[str, Parameter], table: Table, config: Config, more: list[str] | None = None
) -> Table:
    """The arguments of a call: those in the table, checked, and the defaults of the others."""
    prefix = f"{key}." if key else ""
    for name in table:
        if name not in accepted:
            raise config.error(prefix + name, f"there is no such key{suggest(name, [*accepted, *(more or [])])}")
    for parameter in accepted.values():
        if parameter.required and parameter.name not in table:
            raise config.error(prefix + parameter.name, "is missing, and it has no default")
    checked = {name: _check_value(prefix + name, accepted[name], value, config) for name, value in table.items()}
    filled = _defaults(accepted, checked) | checked
    return {name: filled[name] for name in accepted if name in filled}  # in the order of the signature


def _check_value(key: str, parameter: Parameter, value: Any, config: Config) -> Any:
    if isinstance(value, dict) and parameter.takes_component:
        return _component(key, SCHEDULE, value, config)
    try:
        return parameter.check(value)
    except ValueError as error:
        raise config.error(key, str(error)) from None


def _defaults(accepted: dict[str, Parameter], chosen: Table) -> Table:
    timed = {"every_steps", "every_secs"}
    return {
        name: parameter.default
        for name, parameter in accepted.items()
        # Only what TOML can say; and one way of timing that is chosen switches the other's default off.
        if isinstance(parameter.default, (bool, int, float, str)) and not (name in timed and timed & chosen.keys())
    }


def _join_triggers(arguments: Table) -> Table:
    timing = {name: arguments[name] for name in ("every_steps", "every_secs") if name in arguments}
    if not timing:
        return arguments
    rest = {name: value for name, value in arguments.items() if name not in timing}
    return rest | {"when": every(steps=timing.get("every_steps"), secs=timing.get("every_secs"))}
