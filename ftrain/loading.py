"""Loading: a trained model out of the directory of its run, for inference and inspection."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from ftrain.averages import averaged
from ftrain.checkpoints import CheckpointManager, open_reader
from ftrain.checkpoints.paths import BEST, LATEST, StepName
from ftrain.config import open_run
from ftrain.config.load import ConfigError
from ftrain.models import Model
from ftrain.paths import RUN_CONFIG, local_path
from ftrain.storage import exists, is_directory, retry
from ftrain.tasks import Task
from ftrain.training.arguments import call_with_model_state
from ftrain.training.precision import Precision
from ftrain.tree import Tree

_PARTS = ("params", "model_state", "averages")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """The model of a run: its variables, and the config and the task that they belong to.

    A run that has no config.toml, made by `ftrain.train` or `ftrain.Run`, has neither. Its trees
    are then dicts by name: those of a model with lists or classes have another structure than in
    training. `CheckpointManager(directory).restore(like=state)` restores the original one.
    """

    directory: Path
    step: int
    params: Tree
    model_state: Tree | None = None
    averages: Tree | None = None  # moving averages of parameters, if the run has them
    config: Mapping[str, Any] | None = None  # resolved, as in config.toml
    task: Task | None = None
    precision: Precision | None = None  # of the run, and of `apply`

    def apply(self, *inputs: Any) -> Any:
        """Return the outputs of the task's `predict` for a batch; compiled once for each shape.

        The model state, if there is one, is its last argument. Without a `predict`, the model of
        the task is applied to its inputs, as in evaluation.
        """
        return self._function(self.params, self.model_state, *inputs)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        if self.task is None:
            raise ConfigError(
                f"{self.directory} has no {RUN_CONFIG}, which would name its task; "
                "call your own function with `params` and `model_state`"
            )
        predict = self.task.predict
        model = self.task.init
        if predict is None and isinstance(model, Model):
            predict = functools.partial(_apply_model, model, self.model_state is not None)
        if predict is None:
            raise ConfigError(
                f"{self.directory}: its task has no predict; return Task(predict=function), "
                "(params, batch) -> outputs, or call your own function with `params`"
            )
        computed = predict if self.precision is None else self.precision.apply(predict)

        def apply(params: Tree, model_state: Tree | None, batch: Any, *more: Any) -> Any:
            given = {"params": params, "batch": batch}
            given |= {f"input {number}": value for number, value in enumerate(more, 2)}
            return call_with_model_state("predict", computed, given, model_state)

        return jax.jit(apply)

    def __repr__(self) -> str:
        count = len(jax.tree.leaves(self.params))
        what = "by name: the run has no config.toml" if self.config is None else "with its task"
        return (
            f"<model of {self.directory}, step {self.step}: {count} leaves of parameters, {what}>"
        )


def load(
    directory: str | Path, step: StepName | None = None, *, use_averages: bool = False
) -> LoadedModel:
    """Load the model of a run.

        model = ftrain.load("runs/digits", step="best")
        logits = model.apply({"image": images})

    Args:
      directory: of a run, or `RUN/best`, `RUN/latest`, `RUN/500`. For one that a config trained,
        the task is made again from its config.toml, with its data.
      step: the checkpoint, or "best" or "latest". By default the result of the run: the latest, or
        the best if the config has `restore_best`.
      use_averages: make the moving averages the parameters.
    """
    run = local_path(directory)
    if step is None and not retry(lambda: exists(run)) and _step(run.name) is not None:
        step = _step(run.name)
        run = run.parent
    if not retry(lambda: is_directory(run)):
        what = "is a file" if exists(run) else "does not exist"
        raise ConfigError(
            f"{run} {what}, expected the directory of a run; "
            "ftrain.checkpoints.open_reader(path) reads files of weights"
        )
    loaded = _load_by_config if retry(lambda: exists(run / RUN_CONFIG)) else _load_by_name
    model = loaded(run, step)
    if not use_averages:
        return model
    if model.averages is None:
        raise ConfigError(
            f"{run} has no moving averages; drop use_averages, or train with step.averages"
        )
    return dataclasses.replace(model, params=_averaged(model.averages, model.params))


def _load_by_config(run: Path, step: StepName | None) -> LoadedModel:
    job = open_run(run)
    shapes = job.shapes()
    parts = dict(zip(_PARTS, (shapes.params, shapes.model_state, shapes.averages), strict=True))
    like = {name: part for name, part in parts.items() if jax.tree.leaves(part)}
    like["step"] = shapes.step
    chosen = job.saver.result() if step is None else step
    include = [f"{name}(/.*)?" for name in like]
    found = job.saver.manager.restore(like=like, step=chosen, include=include)
    return LoadedModel(
        run,
        int(found["step"]),
        found.get("params", shapes.params),
        found.get("model_state", shapes.model_state),
        found.get("averages"),
        job.plan.resolved(),
        job.task,
        job.precision,
    )


def _load_by_name(run: Path, step: StepName | None) -> LoadedModel:
    manager = CheckpointManager(run)
    number = manager.step_of("latest" if step is None else step)
    reader = open_reader(manager.directory / str(number))
    trees: dict[str, Any] = {}
    for name in reader.variables:
        scope = name.partition("/")[0]
        if scope in _PARTS:
            _put(trees, name.split("/"), jax.numpy.asarray(reader.read(name)))
    if "params" not in trees:
        raise ConfigError(
            f"{reader.path} has no params/..., so it is not of a run; "
            "ftrain.checkpoints.open_reader(path) reads its leaves"
        )
    return LoadedModel(run, number, *(trees.get(name) for name in _PARTS))


def _step(name: str) -> StepName | None:
    """Return the step that the last part of a path names, if it does."""
    if name in (BEST, LATEST):
        return BEST if name == BEST else LATEST
    return int(name) if name.isdecimal() else None


def _apply_model(model: Model, has_state: bool, params: Tree, *given: Any) -> Any:
    """Return the outputs of a model; the last of what is given is its state, if it has one."""
    inputs = given[:-1] if has_state else given
    return model.apply(params, given[-1] if has_state else None, *inputs)[0]


def _put(tree: dict[str, Any], keys: list[str], leaf: Any) -> None:
    *scopes, own = keys
    for scope in scopes:
        tree = tree.setdefault(scope, {})
    tree[own] = leaf


def _averaged(averages: Tree, params: Tree) -> Tree:
    """Return the averages where there are some; loaded by name, the others are missing."""
    if not isinstance(averages, dict) or not isinstance(params, dict):
        return averaged(averages, params)
    return {
        name: _averaged(averages[name], leaf) if averages.get(name) is not None else leaf
        for name, leaf in params.items()
    }
