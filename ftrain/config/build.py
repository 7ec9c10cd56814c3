"""Building: make the objects of a run from a checked plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from ftrain.checkpoints import WarmStart
from ftrain.checkpoints.paths import CHECKPOINTS
from ftrain.cluster import ProcessGroup, Sharding, batch_shard, split_batch
from ftrain.config.call import Call, GroupedCall, Named
from ftrain.config.checking import call, named
from ftrain.config.functions import OPTIMIZER, TRANSFORM, parameters
from ftrain.config.load import ConfigError
from ftrain.config.plan import TASK_INPUT, Plan
from ftrain.data import Pipeline
from ftrain.data.shapes import check_numbers
from ftrain.data.source import Batch
from ftrain.evaluation import evaluate, trace_evaluation
from ftrain.evaluation.program import Predict
from ftrain.formats import DamagedRecordError, SpecError
from ftrain.hooks import CheckpointSaver, Evaluator, Logging, SaveListener, SummarySaver
from ftrain.models import Model
from ftrain.optimizers import Group, GroupError, LearningRate
from ftrain.paths import local_path
from ftrain.run import with_warm_start
from ftrain.storage import is_transient, retry
from ftrain.tasks import Task
from ftrain.training import Hook, Precision, PrecisionError, TrainState
from ftrain.training.compiled_step import Parallel, axis_of, check_parallel, spread
from ftrain.training.loss import Metrics
from ftrain.training.options import LoopOptions
from ftrain.training.precision import count_products
from ftrain.training.state import Initial
from ftrain.training.step import Step
from ftrain.tree import Tree


@dataclass(frozen=True)
class Job:
    """Everything that a run needs. Nothing is on disk yet, and no parameter is initialized."""

    plan: Plan
    directory: Path
    steps: int
    task: Task
    pipeline: Pipeline
    optimizer: optax.GradientTransformation
    learning_rate: LearningRate | None  # from the config, as optax optimizers hide theirs
    precision: Precision | None
    step: Step
    mesh: Mesh
    sharding: Sharding
    parallel: Parallel
    loop_options: LoopOptions
    evaluator: Evaluator | None
    evaluation_pipeline: Pipeline | None  # of a task with an evaluation_source
    summaries: SummarySaver
    logging: Logging
    saver: CheckpointSaver
    others: list[Hook]  # those of [[hooks]]
    warm_start: WarmStart | None = None

    def hooks(self, console: Hook | None = None) -> list[Hook]:
        """Return the hooks of the config; `console` replaces plain log lines."""
        hooks = [self.evaluator, *self.others, self.summaries, console or self.logging, self.saver]
        return [hook for hook in hooks if hook is not None]

    def initial_state(self) -> TrainState:
        """Return the state before the first step, a pure function of the seed.

        It is compiled as one function, which is faster, and each device computes only its shards.
        """
        if self.mesh.size == 1:
            return jax.jit(self._initial_state)()
        return jax.jit(self._initial_state, out_shardings=self.shardings())()

    def initial(self) -> Initial:
        """Return how a run makes its state if there is none to resume from."""
        return Initial(self.initial_state, self.shapes)

    def shapes(self) -> TrainState:
        """Return the shapes, dtypes and shardings of the state, to restore it."""
        shapes = self.abstract_state()
        if self.mesh.size == 1:
            return shapes

        def with_sharding(leaf: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(with_sharding, shapes, self.shardings())

    def shardings(self) -> Tree:
        """Return the shardings of the state; raise ConfigError if a rule does not fit."""
        try:
            return self.sharding.shardings(self.abstract_state(), self.mesh)
        except ValueError as error:
            raise self.plan.config.error("sharding.rules", str(error)) from None

    def options(self, group: ProcessGroup | None = None) -> LoopOptions:
        """Return the options of the loop; a run that has no checkpoint takes the warm start."""
        options: LoopOptions = {**self.loop_options, "group": group}
        if self.warm_start is not None:
            options["scaffold"] = with_warm_start(
                options, self.warm_start, self._renew, self.directory
            )
        return options

    def _renew(self, state: TrainState) -> TrainState:
        """Return the state before the first step of a model with other parameters."""
        where = None if self.mesh.size == 1 else self.shardings()
        renew = jax.jit(self._create, out_shardings=where)
        return renew(state.params, state.model_state, state.rng)

    def _initial_state(self) -> TrainState:
        init = self.task.init
        seed = jax.random.key(self.plan.top["seed"])
        if not isinstance(init, Model):
            init_rng, seed = jax.random.split(seed)
            init = init(init_rng)
        return self._create(init, None, seed)

    def _create(self, params: Tree | Model, model_state: Tree | None, rng: jax.Array) -> TrainState:
        return TrainState.create(
            params,
            self.optimizer,
            seed=rng,
            averages=_averages(self.plan),
            model_state=model_state,
            precision=self.precision,
        )

    def abstract_state(self) -> TrainState:
        """Return the shapes and dtypes of the state, without computing it."""
        return jax.eval_shape(self._initial_state)

    def trace(self) -> tuple[TrainState, Metrics]:
        """Return the shapes of the state and of a step's metrics, without computing them.

        Raises ConfigError if the task, its data and the state do not fit each other.
        """
        batch = self._first_batch(self.pipeline)
        try:
            state = self.abstract_state()
            metrics = jax.eval_shape(
                spread(self.step, self.mesh, self.parallel), state, self._global_shapes(batch)
            )[1]
        except GroupError as error:
            raise self._refused_group(error) from None
        except PrecisionError as error:
            raise self.plan.config.error("precision", str(error)) from None
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConfigError(
                f"{self.plan.config.path}: a step of {self.plan.top['task']} fails: {what}"
            ) from error
        self._trace_evaluation(state)
        self.shardings()
        return state, metrics

    def _trace_evaluation(self, state: TrainState) -> None:
        """Raise ConfigError if the evaluation of the task does not fit its data and the state."""
        task = self.task
        if self.evaluation_pipeline is None or task.predict is None:
            return
        batch = self._first_batch(self.evaluation_pipeline)
        try:
            trace_evaluation(_predict(task, self.precision), state, batch, task.metrics)
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConfigError(
                f"{self.plan.config.path}: the evaluation of {self.plan.top['task']} fails: {what}"
            ) from error

    def groups(self) -> list[Group]:
        """Return the parameter groups of the optimizer, the outermost if several have some."""
        calls = self.plan.calls["optimizer"].every()
        grouped = next((each for each in calls if isinstance(each, GroupedCall)), None)
        return [] if grouped is None else [each.make() for each in grouped.arguments["groups"]]

    def _refused_group(self, error: GroupError) -> ConfigError:
        keys = [
            f"{each.key}.match"
            for each in self.plan.calls["optimizer"].every()
            if each.function is Group and each.arguments["match"] == error.match
        ]
        return self.plan.config.error((*keys, "optimizer")[0], str(error))

    def products(self) -> dict[str, int]:
        """Return how many matrix products and convolutions a step computes in each dtype."""
        step = spread(self.step, self.mesh, self.parallel)
        shapes = self._global_shapes(self._first_batch(self.pipeline))
        return dict(count_products(jax.make_jaxpr(step)(self.abstract_state(), shapes).jaxpr))

    def _global_shapes(self, batch: Batch) -> Tree:
        """Return the shapes of the global batch, from this process's part."""
        count = self.pipeline.shard_count
        return {
            k: jax.ShapeDtypeStruct((len(v) * count, *v.shape[1:]), v.dtype)
            for k, v in batch.items()
        }

    def _first_batch(self, pipeline: Pipeline) -> Batch:
        try:
            return check_numbers(retry(lambda: pipeline.batch(0)))
        except (DamagedRecordError, SpecError):  # complete messages
            raise
        except Exception as error:
            if is_transient(error):
                raise
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            notes = getattr(error, "__notes__", [])
            place = f"\n{'; '.join(notes)}" if notes else ""
            task = self.plan.top["task"]
            raise ConfigError(
                f"{self.plan.config.path}: the input of {task} fails: {what}{place}"
            ) from error


def build(plan: Plan, directory: str | Path | None = None) -> Job:
    """Call the functions of a plan; `directory` overrides run.directory, as for a moved run."""
    task: Task = plan.calls["model"].make()
    _check_input(plan, task)
    mesh = plan.calls["mesh"].make()
    pipeline = _pipeline(plan, task, mesh)
    plan = _with_known_length(plan, pipeline)
    calls = plan.calls
    home = local_path(directory or calls["run"].arguments["directory"])
    optimizer = calls["optimizer"].make()
    rate = _learning_rate(calls["optimizer"])
    for wrapper in ("sync_replicas", "guard", "loss_scaling"):  # the outermost comes last
        if wrapper in calls:
            optimizer = calls[wrapper].make(optimizer=optimizer)
    if calls["step"].arguments.get("averages_of") and "averages" not in calls["step"].arguments:
        raise plan.config.error("step.averages_of", "needs step.averages, a decay such as 0.999")
    sharding = calls["sharding"].make()
    parallel: Parallel = calls["step"].arguments["parallel"]
    _check_replicas(plan, parallel, mesh)
    precision = calls["precision"].make() if "precision" in calls else None
    evaluation_pipeline = _evaluation_pipeline(plan, task, pipeline)
    return Job(
        plan=plan,
        directory=home,
        steps=plan.top["steps"],
        task=task,
        pipeline=pipeline,
        optimizer=optimizer,
        learning_rate=rate,
        precision=precision,
        step=calls["step"].make(
            loss_fn=task.loss_fn,
            optimizer=optimizer,
            learning_rate=rate,
            precision=precision,
            replicas=axis_of(parallel),
        ),
        mesh=mesh,
        sharding=sharding,
        parallel=parallel,
        loop_options={
            "mesh": mesh,
            "sharding": sharding,
            "parallel": parallel,
            "fuse": calls["step"].arguments["fuse"],
            "recoveries": calls["run"].arguments["recoveries"],
            "straggler_timeout": _straggler_timeout(plan),
        },
        evaluator=_evaluator(plan, task, evaluation_pipeline, mesh, precision),
        evaluation_pipeline=evaluation_pipeline,
        summaries=calls["summary"].make(directory=home),
        logging=calls["log"].make(),
        saver=calls["checkpoint"].make(directory=home / CHECKPOINTS, listeners=_listeners(plan)),
        others=[_hook(call, home) for call in plan.hooks],
        warm_start=calls["warm_start"].make() if "warm_start" in calls else None,
    )


def _pipeline(plan: Plan, task: Task, mesh: Mesh) -> Pipeline:
    shard_index, shard_count = batch_shard(mesh)
    pipeline = plan.calls["data"].make(
        source=task.source,
        seed=plan.top["seed"],
        shard_index=shard_index,
        shard_count=shard_count,
        **task.input,
    )
    try:
        split_batch(pipeline.batch_size, mesh)
    except ValueError as error:
        raise plan.config.error("data.batch_size", str(error)) from None
    return pipeline


def _with_known_length(plan: Plan, pipeline: Pipeline) -> Plan:
    """Return the plan with its length in steps."""
    if "steps" in plan.top:
        return plan
    try:
        return plan.with_steps(pipeline.count_steps(plan.top["epochs"]))
    except ConfigError:
        raise
    except ValueError as error:
        raise plan.config.error("epochs", str(error)) from None


def _check_replicas(plan: Plan, parallel: Parallel, mesh: Mesh) -> None:
    try:
        check_parallel(parallel, mesh)
    except ValueError as error:
        raise plan.config.error("step.parallel", str(error)) from None
    if parallel == "jit" and "sync_replicas" in plan.calls:
        raise plan.config.error(
            "step.parallel", 'must be "shard_map", as [sync_replicas] counts replicas, got "jit"'
        )


def _averages(plan: Plan) -> bool | list[str]:
    """Return which parameters the step averages: all, none, or patterns of their names."""
    arguments = plan.calls["step"].arguments
    if "averages" not in arguments:
        return False
    return arguments.get("averages_of") or True


def _straggler_timeout(plan: Plan) -> float | None:
    if "sync_replicas" not in plan.calls:
        return None
    return plan.calls["sync_replicas"].arguments["straggler_timeout"] or None


def _check_input(plan: Plan, task: Task) -> None:
    """Raise if a task sets an argument of the pipeline that belongs in [data]."""
    wrong = [name for name in task.input if name not in TASK_INPUT]
    if wrong:
        raise ConfigError(
            f"{plan.config.path}: {plan.top['task']} returned Task(input=...) with {wrong[0]}; "
            f"input may have {', '.join(sorted(TASK_INPUT))}; set the rest in [data]"
        )


def _hook(call: Call, home: Path) -> Hook:
    """Make a hook of [[hooks]]; its directory is the run's if it needs one and has none."""
    needed = [name for name, parameter in parameters(call.function).items() if parameter.required]
    lacks_directory = "directory" in needed and "directory" not in call.arguments
    return call.make(directory=home) if lacks_directory else call.make()


def _listeners(plan: Plan) -> list[SaveListener]:
    key = "checkpoint.listeners"
    names = plan.calls["checkpoint"].arguments.get("listeners", [])
    listeners = [named(name, key, plan.config).function for name in names]
    for name, listener in zip(names, listeners, strict=True):
        if not (isinstance(listener, type) and issubclass(listener, SaveListener)):
            raise plan.config.error(key, f"{name!r} is not a subclass of ftrain.hooks.SaveListener")
    return [call(key, listener, {}, plan.config).make() for listener in listeners]


def _evaluation_pipeline(plan: Plan, task: Task, training: Pipeline) -> Pipeline | None:
    """Return all held-out examples of a task, once, in batches like those of the training."""
    size = plan.calls["evaluation"].arguments.get("batch_size")
    if task.evaluation_source is None:
        if size is not None:
            raise plan.config.error(
                "evaluation.batch_size", f"{plan.top['task']} has no evaluation_source to batch"
            )
        return None
    try:
        return Pipeline(
            task.evaluation_source,
            batch_size=training.batch_size if size is None else size,
            shuffle=False,
            epochs=1,
            last="pad",
            pad=task.input.get("pad"),
            threads=training.threads,
            shard_index=training.shard_index,
            shard_count=training.shard_count,
        )
    except (TypeError, ValueError) as error:
        raise plan.config.error("evaluation.batch_size", str(error)) from None


def _predict(task: Task, precision: Precision | None) -> Predict:
    """Return the function that a task is measured by, in the dtypes of the policy."""
    assert task.predict is not None  # a Task with an evaluation_source has it
    return task.predict if precision is None else precision.apply(task.predict)


def _measuring(
    task: Task, pipeline: Pipeline, mesh: Mesh, precision: Precision | None
) -> Callable[..., Mapping[str, Any]]:
    """Return the function of an Evaluator that measures a task on its held-out examples."""
    predict = _predict(task, precision)

    def measure(params: Tree, model_state: Tree | None = None) -> Mapping[str, Any]:
        return evaluate(predict, params, pipeline, task.metrics, model_state=model_state, mesh=mesh)

    return measure


def _evaluator(
    plan: Plan, task: Task, pipeline: Pipeline | None, mesh: Mesh, precision: Precision | None
) -> Evaluator | None:
    function = task.evaluate if pipeline is None else _measuring(task, pipeline, mesh, precision)
    if function is None:
        return None
    evaluator: Evaluator = plan.calls["evaluation"].make(evaluate=function)
    if evaluator.use_averages and "averages" not in plan.calls["step"].arguments:
        raise ConfigError(
            f"{plan.config.path}: evaluation.use_averages needs step.averages, "
            "a decay such as 0.999"
        )
    return evaluator


def _learning_rate(optimizer: Call) -> LearningRate | None:
    """Return the learning rate of an optimizer, or of the only optimizer in it that has one."""
    if isinstance(optimizer, GroupedCall):
        return _learning_rate(optimizer.arguments["optimizer"])
    if "learning_rate" in optimizer.arguments:
        rate = optimizer.arguments["learning_rate"]
        return rate.make() if isinstance(rate, (Call, Named)) else rate
    inner = [nested for nested in optimizer.nested() if nested.kind in (OPTIMIZER, TRANSFORM)]
    rates = [rate for rate in map(_learning_rate, inner) if rate is not None]
    if len(rates) != 1:
        return None
    # MultiSteps counts its own steps, so a schedule in it does not see the step of the run.
    is_hidden = optimizer.function is optax.MultiSteps and callable(rates[0])
    return None if is_hidden else rates[0]
