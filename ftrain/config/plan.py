"""The plan of a job: every function that a config calls, with its arguments checked, and nothing called yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ftrain.cluster import Sharding, make_mesh
from ftrain.config.call import Call
from ftrain.config.checking import call, check_table, component, resolve
from ftrain.config.kinds import HOOK, OPTIMIZER, TASK
from ftrain.config.load import Config, Table
from ftrain.config.types import Parameter, parameters
from ftrain.data import Pipeline
from ftrain.gradients import guard, loss_scaling
from ftrain.hooks import CheckpointSaver, Evaluator, Logging, SummarySaver
from ftrain.optimizers import sync_replicas
from ftrain.paths import local_path
from ftrain.training import Fuse, Hook, make_step
from ftrain.training.compiled_step import Parallel
from ftrain.training.fusion import check_fuse
from ftrain.training.recovery import check_recoveries


@dataclass(frozen=True)
class Section:
    """A table of a config that always calls the same function; `given` are the arguments that the builder adds.

    An `optional` one calls it only if the table is there.
    """

    function: Callable[..., Any]
    given: frozenset[str] = frozenset()
    optional: bool = False
    beside: Callable[..., Any] | None = (
        None  # its arguments are keys of the table too, for the builder
    )

    def more(self) -> dict[str, Parameter]:
        return {} if self.beside is None else parameters(self.beside)


def _top(task: str, steps: int, seed: int = 0) -> None:
    """The keys that stand above all tables."""


def _run(directory: str = "", recoveries: int = 3) -> None:
    """The table `run`."""


def _listening(listeners: Sequence[str] | None = None) -> None:
    """Who is told of checkpoints, in the table `checkpoint`, as "package.module:name" of a SaveListener."""


def _cluster(connect_timeout: float = 60.0, hang_timeout: float = 0.0) -> None:
    """The table `cluster`: seconds in which all processes have to come, and without a step after which one ends."""


def _waiting(straggler_timeout: float = 0.0) -> None:
    """Seconds that a step waits for the input of a process, in the table `sync_replicas`; 0 for as long as it takes."""


def _calls(
    fuse: Fuse = "auto", parallel: Parallel = "jit", averages_of: Sequence[str] | None = None
) -> None:
    """How steps are called, in the table `step`, and patterns for the parameters that it keeps averages of."""


INPUT = frozenset(
    {"buckets", "pad", "transform"}
)  # what a task gives to its pipeline: a config cannot say it
_STEP = frozenset({"loss_fn", "optimizer", "with_model_state", "learning_rate", "replicas"})
_PIPELINE = INPUT | {"source", "seed", "shard_index", "shard_count"}
TOP = Section(_top)
SECTIONS = {
    "run": Section(_run),
    "data": Section(Pipeline, _PIPELINE),
    "step": Section(make_step, _STEP, beside=_calls),
    "guard": Section(guard, frozenset({"optimizer"}), optional=True),
    "loss_scaling": Section(loss_scaling, frozenset({"optimizer"}), optional=True),
    "sync_replicas": Section(
        sync_replicas, frozenset({"optimizer"}), optional=True, beside=_waiting
    ),
    "mesh": Section(make_mesh),
    "sharding": Section(Sharding),
    "cluster": Section(_cluster),
    "checkpoint": Section(
        CheckpointSaver, frozenset({"directory", "listeners"}), beside=_listening
    ),
    "summary": Section(SummarySaver, frozenset({"directory"})),
    "log": Section(Logging, frozenset({"write"})),
    "evaluation": Section(Evaluator, frozenset({"evaluate"})),
}
NAMED = ("model", "optimizer")  # tables whose function the config chooses
HOOKS = "hooks"  # an array of tables, [[hooks]], each of which names one
TABLED = {  # hooks that have a table of their own
    section.function.__name__: name
    for name, section in SECTIONS.items()
    if isinstance(section.function, type) and issubclass(section.function, Hook)
}


@dataclass(frozen=True)
class Plan:
    config: Config
    top: Table
    calls: dict[str, Call]
    hooks: list[Call]

    def resolved(self) -> Table:
        """The whole config as it would be written out in full, defaults included."""
        tables = self.top | {name: call.resolved() for name, call in self.calls.items()}
        return tables | ({HOOKS: [hook.resolved() for hook in self.hooks]} if self.hooks else {})


def plan(config: Config) -> Plan:
    """Check a whole config against the signatures of the functions it calls."""
    tables = {
        name: value for name, value in config.values.items() if name in SECTIONS or name in NAMED
    }
    for name, value in tables.items():
        if not isinstance(value, dict):
            raise config.error(name, f"should be a table, [{name}], got {value!r}")
    rest = {
        name: value for name, value in config.values.items() if name not in tables and name != HOOKS
    }
    top = _check_top(config, rest)
    task = resolve(TASK, top["task"], "task", config)
    calls = {
        "model": call("model", task, tables.get("model", {}), config, kind=TASK),
        "optimizer": component("optimizer", OPTIMIZER, tables.get("optimizer", {}), config),
    }
    for name, section in SECTIONS.items():
        if section.optional and name not in tables:
            continue
        table = tables.get(name, {})
        calls[name] = call(
            name, section.function, table, config, given=section.given, beside=section.more()
        )
    if not calls["run"].arguments["directory"]:
        calls["run"].arguments["directory"] = f"runs/{config.path.stem}"
    _check("run.directory", local_path, calls["run"].arguments["directory"], config)
    _check("step.fuse", check_fuse, calls["step"].arguments["fuse"], config)
    for key, least in (("connect_timeout", 1.0), ("hang_timeout", 0.0)):
        seconds = calls["cluster"].arguments[key]
        if not least <= seconds < 1e6:
            raise config.error(
                f"cluster.{key}", f"should be seconds from {least:g} on, got {seconds:g}"
            )
    _check("run.recoveries", check_recoveries, calls["run"].arguments["recoveries"], config)
    return Plan(config, top, calls, _hooks(config))


def _check(key: str, check: Callable[[Any], object], value: Any, config: Config) -> None:
    try:
        check(value)
    except ValueError as error:
        raise config.error(key, str(error)) from None


def _hooks(config: Config) -> list[Call]:
    tables = config.values.get(HOOKS, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise config.error(HOOKS, f"should be tables, [[{HOOKS}]], got {tables!r}")
    for number, table in enumerate(tables):
        if isinstance(table.get("name"), str) and table["name"] in TABLED:
            raise config.error(
                f"{HOOKS}.{number}.name", f"{table['name']} has a table: [{TABLED[table['name']]}]"
            )
    return [
        component(f"{HOOKS}.{number}", HOOK, table, config, given=frozenset({"directory"}))
        for number, table in enumerate(tables)
    ]


def _check_top(config: Config, table: Table) -> Table:
    top = check_table("", parameters(TOP.function), table, config, more=(*SECTIONS, *NAMED, HOOKS))
    if top["steps"] < 1:
        raise config.error("steps", f"should be at least 1, got {top['steps']}")
    if not 0 <= top["seed"] < 2**32:  # jax would drop the bits above
        raise config.error("seed", f"should be at least 0 and below 2**32, got {top['seed']}")
    return top
