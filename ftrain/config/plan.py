"""The plan of a job: every function that a config calls, with its arguments checked, and nothing called yet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftrain.cluster import make_mesh
from ftrain.config.call import Call, call, check_table, component, resolve
from ftrain.config.kinds import OPTIMIZER, TASK
from ftrain.config.load import Config, Table
from ftrain.config.types import parameters
from ftrain.data import Pipeline
from ftrain.gradients import guard, loss_scaling
from ftrain.hooks import CheckpointSaver, Evaluator, Logging, SummarySaver
from ftrain.training import make_step


@dataclass(frozen=True)
class Section:
    """A table of a config that always calls the same function; `given` are the arguments that the builder adds.

    An `optional` one calls it only if the table is there.
    """

    function: Callable[..., Any]
    given: frozenset[str] = frozenset()
    optional: bool = False


def _top(task: str, steps: int, seed: int = 0) -> None:
    """The keys that stand above all tables."""


def _run(directory: str = "") -> None:
    """The table `run`."""


TOP = Section(_top)
SECTIONS = {
    "run": Section(_run),
    "data": Section(Pipeline, frozenset({"source", "seed", "shard_index", "shard_count"})),
    "step": Section(make_step, frozenset({"loss_fn", "optimizer", "with_model_state", "learning_rate"})),
    "guard": Section(guard, frozenset({"optimizer"}), optional=True),
    "loss_scaling": Section(loss_scaling, frozenset({"optimizer"}), optional=True),
    "mesh": Section(make_mesh),
    "checkpoint": Section(CheckpointSaver, frozenset({"directory"})),
    "summary": Section(SummarySaver, frozenset({"directory"})),
    "log": Section(Logging, frozenset({"write"})),
    "evaluation": Section(Evaluator, frozenset({"evaluate"})),
}
NAMED = ("model", "optimizer")  # tables whose function the config chooses


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
    top = _check_top(config, {name: value for name, value in config.values.items() if name not in tables})
    task = resolve(TASK, top["task"], "task", config)
    calls = {
        "model": call("model", task, tables.get("model", {}), config, kind=TASK),
        "optimizer": component("optimizer", OPTIMIZER, tables.get("optimizer", {}), config),
    }
    for name, section in SECTIONS.items():
        if section.optional and name not in tables:
            continue
        calls[name] = call(name, section.function, tables.get(name, {}), config, given=section.given)
    if not calls["run"].arguments["directory"]:
        calls["run"].arguments["directory"] = f"runs/{config.path.stem}"
    return Plan(config, top, calls)


def _check_top(config: Config, table: Table) -> Table:
    top = check_table("", parameters(TOP.function), table, config, more=(*SECTIONS, *NAMED))
    if top["steps"] < 1:
        raise config.error("steps", f"should be at least 1, got {top['steps']}")
    if not 0 <= top["seed"] < 2**32:  # jax would drop the bits above
        raise config.error("seed", f"should be at least 0 and below 2**32, got {top['seed']}")
    return top
