"""A job: everything that a run needs, built from a config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from ftrain.checkpoints import WarmStart
from ftrain.cluster import ProcessGroup, Sharding
from ftrain.config.call import GroupedCall
from ftrain.config.load import ConfigError
from ftrain.config.plan import Plan
from ftrain.data import Pipeline
from ftrain.data.shapes import check_numbers
from ftrain.data.source import Batch
from ftrain.evaluation import trace_evaluation
from ftrain.evaluation.program import Predict
from ftrain.formats import DamagedRecordError, SpecError
from ftrain.hooks import CheckpointSaver, Evaluator, Logging, SummarySaver
from ftrain.models import Model
from ftrain.optimizers import Group, GroupError, LearningRate
from ftrain.run import with_warm_start
from ftrain.storage import is_transient, retry
from ftrain.tasks import Task
from ftrain.training import Hook, Precision, PrecisionError, TrainState
from ftrain.training.compiled_step import Parallel, spread
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
        self._check_best_metric()
        self.shardings()
        return state, metrics

    def _trace_evaluation(self, state: TrainState) -> None:
        """Raise ConfigError if the evaluation of the task does not fit its data and the state."""
        task = self.task
        if self.evaluation_pipeline is None or task.predict is None:
            return
        batch = self._first_batch(self.evaluation_pipeline)
        try:
            trace_evaluation(predict_with(task, self.precision), state, batch, task.metrics)
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConfigError(
                f"{self.plan.config.path}: the evaluation of {self.plan.top['task']} fails: {what}"
            ) from error

    def _check_best_metric(self) -> None:
        """Raise ConfigError if the best checkpoints are ranked by a result that there is not."""
        retention = self.saver.manager.retention
        results = self.task.metrics
        is_known = self.evaluation_pipeline is not None and results is not None and not self.others
        name = retention.metric.removeprefix("eval/")
        if not retention.best or not is_known or name == retention.metric:
            return
        if results is not None and name.partition("/")[0] not in results:
            raise self.plan.config.error(
                "checkpoint.best_metric",
                f"the evaluation measures no {retention.metric!r}; "
                f"there are {', '.join(f'eval/{each}' for each in results)}",
            )

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


def predict_with(task: Task, precision: Precision | None) -> Predict:
    """Return the function that a task is measured by, in the dtypes of the policy."""
    assert task.predict is not None  # a Task with an evaluation_source has it
    return task.predict if precision is None else precision.apply(task.predict)


def _averages(plan: Plan) -> bool | list[str]:
    """Return which parameters the step averages: all, none, or patterns of their names."""
    arguments = plan.calls["step"].arguments
    if "averages" not in arguments:
        return False
    return arguments.get("averages_of") or True
