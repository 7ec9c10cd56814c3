"""Building: make the objects of a run from a checked plan."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from ftrain.checkpoints.paths import CHECKPOINTS
from ftrain.cluster import batch_shard, split_batch
from ftrain.config.call import Call, GroupedCall, Named
from ftrain.config.checking import call, named
from ftrain.config.functions import OPTIMIZER, TRANSFORM, parameters
from ftrain.config.job import Job, predict_with
from ftrain.config.load import ConfigError
from ftrain.config.plan import TASK_INPUT, Plan
from ftrain.data import Pipeline
from ftrain.evaluation import evaluate
from ftrain.hooks import Evaluator, SaveListener
from ftrain.optimizers import LearningRate
from ftrain.paths import local_path
from ftrain.tasks import Task
from ftrain.training import Hook, Precision
from ftrain.training.compiled_step import Parallel, axis_of, check_parallel
from ftrain.tree import Tree


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


def _measuring(
    task: Task, pipeline: Pipeline, mesh: Mesh, precision: Precision | None
) -> Callable[..., Mapping[str, Any]]:
    """Return the function of an Evaluator that measures a task on its held-out examples."""
    predict = predict_with(task, precision)

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
