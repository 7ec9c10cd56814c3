"""The plan of a job: every call of a config, with checked arguments; nothing is called yet."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ftrain.checkpoints import WarmStart
from ftrain.cluster import Sharding, make_mesh
from ftrain.config.call import Call
from ftrain.config.checking import call, check_table, component, resolve
from ftrain.config.functions import HOOK, OPTIMIZER, TASK, Parameter, parameters
from ftrain.config.load import LENGTHS, Config, Table, escape_braces
from ftrain.config.shares import resolve_shares, restore_shares
from ftrain.config.template import expand_directory
from ftrain.data import Pipeline
from ftrain.gradients import guard, loss_scaling
from ftrain.hooks import CheckpointSaver, Evaluator, Logging, SummarySaver
from ftrain.optimizers import sync_replicas
from ftrain.paths import local_path
from ftrain.training import Fuse, Hook, Precision, make_step
from ftrain.training.compiled_step import Parallel
from ftrain.training.fusion import check_fuse
from ftrain.training.recovery import check_recoveries


@dataclass(frozen=True)
class Section:
    """A table of a config that always calls the same function."""

    function: Callable[..., Any]
    given: frozenset[str] = frozenset()  # arguments that the builder adds
    optional: bool = False  # called only if the config has the table
    extra: Callable[..., Any] | None = None  # its arguments are keys too, for the builder

    def extra_parameters(self) -> dict[str, Parameter]:
        """Return the keys of the table that are not arguments of the function."""
        return {} if self.extra is None else parameters(self.extra)


def _top(
    task: str, steps: int | None = None, epochs: int | float | None = None, seed: int = 0
) -> None:
    """The keys above all tables. The length of the run is one of `steps` and `epochs`."""


def _run(directory: str = "", recoveries: int = 3) -> None:
    """The table `run`."""


def _checkpoint_extra(listeners: Sequence[str] | None = None) -> None:
    """Keys of `checkpoint` for the builder: names of SaveListener classes."""


def _cluster(connect_timeout: float = 60.0, hang_timeout: float = 0.0) -> None:
    """The table `cluster`: seconds to connect, and seconds without a step before a process ends."""


def _sync_replicas_extra(straggler_timeout: float = 0.0) -> None:
    """Keys of `sync_replicas` for the builder: seconds to wait for input; 0 for no limit."""


def _step_extra(
    fuse: Fuse = "auto", parallel: Parallel = "jit", averages_of: Sequence[str] | None = None
) -> None:
    """Keys of `step` for the builder: how steps are called, which parameters are averaged."""


def _evaluation_extra(batch_size: int | None = None) -> None:
    """Keys of `evaluation` for the builder: examples of a batch, those of `data` by default."""


# Arguments of the pipeline that a task may set, because TOML cannot express them.
TASK_INPUT = frozenset({"buckets", "pad", "transform"})
_STEP = frozenset({"loss_fn", "optimizer", "learning_rate", "replicas", "precision"})
_ANY_LENGTH = 1_000_000  # stands for the steps of a run whose length in epochs is not known yet
_PIPELINE = TASK_INPUT | {"source", "seed", "shard_index", "shard_count"}
TOP = Section(_top)
SECTIONS = {
    "run": Section(_run),
    "data": Section(Pipeline, _PIPELINE),
    "step": Section(make_step, _STEP, extra=_step_extra),
    "precision": Section(Precision, optional=True),
    "guard": Section(guard, frozenset({"optimizer"}), optional=True),
    "loss_scaling": Section(loss_scaling, frozenset({"optimizer"}), optional=True),
    "sync_replicas": Section(
        sync_replicas, frozenset({"optimizer"}), optional=True, extra=_sync_replicas_extra
    ),
    "mesh": Section(make_mesh),
    "sharding": Section(Sharding),
    "cluster": Section(_cluster),
    "warm_start": Section(WarmStart, optional=True),
    "checkpoint": Section(
        CheckpointSaver, frozenset({"directory", "listeners"}), extra=_checkpoint_extra
    ),
    "summary": Section(SummarySaver, frozenset({"directory"})),
    "log": Section(Logging, frozenset({"write"})),
    "evaluation": Section(Evaluator, frozenset({"evaluate"}), extra=_evaluation_extra),
}
NAMED = ("model", "optimizer")  # tables whose function the config chooses
HOOKS = "hooks"  # an array of tables, [[hooks]], each of which names one
HOOK_TABLES = {  # hooks that have their own table
    section.function.__name__: name
    for name, section in SECTIONS.items()
    if isinstance(section.function, type) and issubclass(section.function, Hook)
}


@dataclass(frozen=True)
class Plan:
    """A checked config: its keys above all tables, and the calls of its tables."""

    config: Config
    top: Table
    calls: dict[str, Call]
    hooks: list[Call]
    shares: dict[str, str] = field(default_factory=dict)  # of the run, such as "5%", by dotted key

    def resolved(self) -> Table:
        """Return the whole config, defaults included."""
        tables = self.top | {name: call.resolved() for name, call in self.calls.items()}
        tables |= {HOOKS: [hook.resolved() for hook in self.hooks]} if self.hooks else {}
        tables["run"]["directory"] = escape_braces(tables["run"]["directory"])
        restore_shares(tables, self.shares)
        return tables

    def with_steps(self, steps: int) -> "Plan":
        """Return the plan of a config with its length in epochs, now that it is known in steps."""
        known = {key: value for key, value in self.config.values.items() if key not in LENGTHS}
        directory = escape_braces(
            self.calls["run"].arguments["directory"]
        )  # which may name the epochs
        known |= {"steps": steps, "run": known.get("run", {}) | {"directory": directory}}
        again = plan(replace(self.config, values=known))
        shared = {key.partition(".")[0] for key in self.shares}
        changed = {name: call for name, call in again.calls.items() if name in shared}
        return replace(self, top=again.top, calls=self.calls | changed, hooks=again.hooks)


def plan(config: Config) -> Plan:
    """Check a whole config against the signatures of the functions it calls."""
    steps = config.values.get("steps")
    length = steps if isinstance(steps, int) else _ANY_LENGTH
    values, shares = resolve_shares(config.values, length)
    written = config
    config = replace(config, values=values)
    tables = {
        name: value for name, value in config.values.items() if name in SECTIONS or name in NAMED
    }
    for name, value in tables.items():
        if not isinstance(value, dict):
            raise config.error(name, f"must be a table, [{name}], got {value!r}")
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
            name,
            section.function,
            table,
            config,
            given=section.given,
            extra=section.extra_parameters(),
        )
    if _needs_loss_scaling(calls):
        given = SECTIONS["loss_scaling"].given
        calls["loss_scaling"] = call("loss_scaling", loss_scaling, {}, config, given=given)
    planned = Plan(written, top, calls, _hooks(config), shares)
    directory = calls["run"].arguments["directory"] or escape_braces(f"runs/{config.path.stem}")
    directory = expand_directory(directory, planned.resolved(), config)
    calls["run"].arguments["directory"] = directory
    _check("run.directory", local_path, directory, config)
    _check("step.fuse", check_fuse, calls["step"].arguments["fuse"], config)
    for key, minimum in (("connect_timeout", 1.0), ("hang_timeout", 0.0)):
        seconds = calls["cluster"].arguments[key]
        if not minimum <= seconds < 1e6:
            raise config.error(
                f"cluster.{key}", f"must be at least {minimum:g} seconds, got {seconds:g}"
            )
    _check("run.recoveries", check_recoveries, calls["run"].arguments["recoveries"], config)
    return planned


def _needs_loss_scaling(calls: dict[str, Call]) -> bool:
    """True for a policy in float16, whose small gradients underflow, unless the loss is scaled."""
    if "precision" not in calls or "loss_scaling" in calls:
        return False
    policy: Precision = calls["precision"].make()
    return policy.compute == "float16" and not _scales_loss(calls["optimizer"])


def _scales_loss(optimizer: Call) -> bool:
    return optimizer.function is loss_scaling or any(map(_scales_loss, optimizer.nested()))


def _check(key: str, check: Callable[[Any], object], value: Any, config: Config) -> None:
    try:
        check(value)
    except ValueError as error:
        raise config.error(key, str(error)) from None


def _hooks(config: Config) -> list[Call]:
    tables = config.values.get(HOOKS, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise config.error(HOOKS, f"must be tables, [[{HOOKS}]], got {tables!r}")
    for number, table in enumerate(tables):
        if isinstance(table.get("name"), str) and table["name"] in HOOK_TABLES:
            own = HOOK_TABLES[table["name"]]
            wrong = f"{table['name']} has its own table: use [{own}]"
            raise config.error(f"{HOOKS}.{number}.name", wrong)
    return [
        component(f"{HOOKS}.{number}", HOOK, table, config, given=frozenset({"directory"}))
        for number, table in enumerate(tables)
    ]


def _check_top(config: Config, table: Table) -> Table:
    top = check_table("", parameters(TOP.function), table, config, more=(*SECTIONS, *NAMED, HOOKS))
    given = [name for name in LENGTHS if name in top]
    if len(given) != 1:
        wrong = "is set and so is epochs: keep one of them," if given else "is missing: set"
        raise config.error("steps", f"{wrong} the length of the run in steps or in epochs")
    if "steps" in top and top["steps"] < 1:
        raise config.error("steps", f"must be at least 1, got {top['steps']}")
    if "epochs" in top and not 0 < top["epochs"] < math.inf:
        raise config.error("epochs", f"must be above 0, got {top['epochs']}")
    if not 0 <= top["seed"] < 2**32:  # jax would drop the bits above
        raise config.error("seed", f"must be at least 0 and below 2**32, got {top['seed']}")
    return top
