"""A run: the loop with a directory, and the hooks that everyone wants."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from ftrain.data import Pipeline
from ftrain.hooks import CheckpointSaver, Logging, ProgressBar, StepCounter, StopAtStep, StopOnNaN, SummarySaver
from ftrain.training import Hook, Loop, TrainState, Trigger, every, make_step
from ftrain.training.step import LossFunction, Step
from ftrain.tree import Tree

CHECKPOINTS = "checkpoints"  # the directory of them, inside a run's


class Run(Loop):
    """A loop that guards against NaN, counts, logs and, in a directory, saves, resumes and writes summaries.

        with ftrain.Run(step, state, data, steps=1000, directory="runs/mine") as run:
            while not run.should_stop():
                run.step()

    `hooks` come on top; one of a class that is here by default takes the default's place, for instance
    `CheckpointSaver("runs/mine/checkpoints", when=every(steps=50))`. Enter it again with the same directory and it
    goes on from the newest checkpoint.
    """

    def __init__(
        self,
        step: Step,
        state: TrainState,
        data: Pipeline | Iterable[Any],
        *,
        steps: int | None = None,
        hooks: Sequence[Hook] = (),
        directory: str | Path | None = None,
        mesh: Mesh | None = None,
    ):
        super().__init__(step, state, data, hooks=list(_complete(hooks, steps, directory)), mesh=mesh)


def train(
    loss_fn: LossFunction,
    params: Tree,
    data: Pipeline | Iterable[Any],
    *,
    optimizer: optax.GradientTransformation,
    steps: int | None = None,
    hooks: Sequence[Hook] = (),
    directory: str | Path | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    clip_global_norm: float | None = None,
) -> TrainState:
    """Train `params` to minimise `loss_fn(params, batch, rng)` and return the final state.

    Ends after `steps` steps, at the end of the data, or when a hook says so. With a `directory`, a run that was
    interrupted goes on where its newest checkpoint stands.
    """
    step = make_step(loss_fn, optimizer, clip_global_norm=clip_global_norm)
    state = TrainState.create(params, optimizer, seed=seed)
    with Run(step, state, data, steps=steps, hooks=hooks, directory=directory, mesh=mesh) as run:
        while not run.should_stop():
            run.step()
    return run.state


def _complete(hooks: Sequence[Hook], steps: int | None, directory: str | Path | None) -> Iterator[Hook]:
    """The default hooks and those given, in the order in which they must see a step.

    The guard comes first, so that nothing is written of a step that failed; those that measure come before those that
    write it down, and the saver comes last.
    """

    def given(*kinds: type[Hook]) -> bool:
        return any(isinstance(hook, kinds) for hook in hooks)

    writers: list[Hook] = []
    if directory is not None and not given(SummarySaver):
        writers.append(SummarySaver(directory))
    if not given(Logging, ProgressBar):
        writers.append(Logging())
    if not given(StopOnNaN):
        yield StopOnNaN()
    if not given(StepCounter):
        yield StepCounter(when=_written_when([*hooks, *writers]))
    yield from hooks
    yield from writers
    if directory is not None and not given(CheckpointSaver):
        yield CheckpointSaver(Path(directory) / CHECKPOINTS)
    if steps is not None:
        yield StopAtStep(steps)


def _written_when(hooks: Sequence[Hook]) -> Trigger:
    """When metrics are written: speed is measured at the same steps, so that it stands in the same lines."""
    chosen = [hook.when for kind in (Logging, SummarySaver) for hook in hooks if isinstance(hook, kind)]
    return chosen[0] if chosen else every(steps=100)
