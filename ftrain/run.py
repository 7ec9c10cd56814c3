"""A run: the loop with a directory, and the hooks that everyone wants."""

import functools
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from ftrain.cluster import Company, Sharding
from ftrain.data import Pipeline
from ftrain.hooks import (
    CheckpointSaver,
    CrashBundle,
    DataWatch,
    LogFile,
    Logging,
    ProgressBar,
    StepCounter,
    StopAtStep,
    StopOnNaN,
    SummarySaver,
)
from ftrain.launching.reporter import reporter_of_this_process
from ftrain.optimizers import LearningRate
from ftrain.training import Fuse, Hook, Loop, Scaffold, TrainState, Trigger, every, make_step, stop_on_signals
from ftrain.training.arguments import check_arrays, check_optimizer
from ftrain.training.objective import LossFunction
from ftrain.training.parallel import Parallel, axis_of
from ftrain.training.step import Step
from ftrain.tree import Tree

CHECKPOINTS = "checkpoints"  # the directory of them, inside a run's
LOGS = "logs"  # the directory of what processes other than the first have to say


class Run(Loop):
    """A loop that guards against NaN, counts, logs and, in a directory, saves, resumes and writes summaries.

        with ftrain.Run(step, state, data, steps=1000, directory="runs/mine") as run:
            while not run.should_stop():
                run.advance()

    `advance` takes the steps up to the next one at which a hook is due, or a part of them, in one compiled call; `step`
    takes exactly one.

    `hooks` come on top; one of a class that is here by default takes the default's place, for instance
    `CheckpointSaver("runs/mine/checkpoints", when=every(steps=50))`. A new run in the same directory goes on from the
    newest checkpoint.
    """

    def __init__(
        self,
        step: Step,
        state: TrainState | Callable[[], TrainState],
        data: Pipeline | Iterable[Any],
        *,
        steps: int | None = None,
        hooks: Sequence[Hook] = (),
        directory: str | Path | None = None,
        mesh: Mesh | None = None,
        fuse: Fuse = "auto",
        scaffold: Scaffold | None = None,
        sharding: Sharding | None = None,
        parallel: Parallel = "jit",
        recoveries: int = 3,
        company: Company | None = None,
        straggler_timeout: float | None = None,
    ):
        if company is not None and directory is not None:
            company.check_directory(directory)  # now, and not when a first save waits for the others
        hooks = _complete(hooks, steps, directory, data)
        if company is not None and not company.is_chief and directory is not None:
            hooks.append(LogFile(Path(directory) / LOGS / f"process_{company.index}.log", when=_written_when(hooks)))
        reporter = reporter_of_this_process()
        if reporter.is_supervised:
            index = 0 if company is None else company.index
            reporter.log = None if directory is None else Path(directory) / LOGS / f"process_{index}.log"
            reporter.steps = steps
        super().__init__(
            step,
            state,
            data,
            hooks=hooks,
            mesh=mesh,
            fuse=fuse,
            scaffold=scaffold,
            sharding=sharding,
            parallel=parallel,
            recoveries=recoveries,
            company=company,
            straggler_timeout=straggler_timeout,
        )


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
    accumulate: int = 1,
    averages: float | None = None,
    averages_ramp: bool = False,
    averages_of: str | Sequence[str] = (),
    merge_rows: bool = True,
    learning_rate: LearningRate | None = None,
    fuse: Fuse = "auto",
    scaffold: Scaffold | None = None,
    sharding: Sharding | None = None,
    parallel: Parallel = "jit",
    recoveries: int = 3,
    company: Company | None = None,
) -> TrainState:
    """Train `params` to minimise `loss_fn(params, batch, rng)` and return the final state.

    Ends after `steps` steps, at the end of the data, or when a hook says so. With a `directory`, a run that was
    interrupted goes on where its newest checkpoint stands; Ctrl-C saves one before it raises KeyboardInterrupt.
    `averages_of` are patterns for the parameters to average, all of them by default. `clip_global_norm`, `accumulate`,
    `averages`, `averages_ramp`, `merge_rows` and `learning_rate` are those of `make_step`; `fuse`, `scaffold`,
    `sharding`, `parallel`, `recoveries` and `company` those of `Loop`.
    """
    check_optimizer(optimizer)  # now, before anything is written
    check_arrays("params", params)
    step = make_step(
        loss_fn,
        optimizer,
        clip_global_norm=clip_global_norm,
        accumulate=accumulate,
        averages=averages,
        averages_ramp=averages_ramp,
        merge_rows=merge_rows,
        learning_rate=learning_rate,
        replicas=axis_of(parallel),
    )
    run = Run(
        step,
        functools.partial(
            TrainState.create, params, optimizer, seed=seed, averages=(averages_of or True) if averages else False
        ),
        data,
        steps=steps,
        hooks=hooks,
        directory=directory,
        mesh=mesh,
        fuse=fuse,
        scaffold=scaffold,
        sharding=sharding,
        parallel=parallel,
        recoveries=recoveries,
        company=company,
    )
    with stop_on_signals(run.interrupt, [signal.SIGINT]), run:
        while not run.should_stop():
            run.advance()
    if run.interrupted:
        raise KeyboardInterrupt
    return run.state


def _complete(hooks: Sequence[Hook], steps: int | None, directory: str | Path | None, data: Any) -> list[Hook]:
    """The default hooks and those given, in the order in which they must see a step."""
    complete: list[Hook] = list(hooks)

    def add_unless_given(hook: Hook, *kinds: type[Hook]) -> None:
        if not any(isinstance(given, (type(hook), *kinds)) for given in hooks):
            complete.append(hook)

    if directory is not None:
        add_unless_given(SummarySaver(directory))
        add_unless_given(CheckpointSaver(Path(directory) / CHECKPOINTS))
        add_unless_given(CrashBundle(directory))
        if isinstance(data, Pipeline):
            add_unless_given(DataWatch(directory, data))
    add_unless_given(Logging(), ProgressBar)
    add_unless_given(StopOnNaN())
    add_unless_given(StepCounter(when=_written_when(complete)))
    if steps is not None:
        complete.append(StopAtStep(steps))
    return sorted(complete, key=_rank)


def _rank(hook: Hook) -> int:
    """The guard comes first, so that nothing is written of a step that failed; then those that measure, those that
    write it down, and last the saver."""
    ranks = ((StopOnNaN, 0), (StepCounter, 1), ((SummarySaver, Logging, ProgressBar), 3), (CheckpointSaver, 4))
    return next((rank for kinds, rank in ranks if isinstance(hook, kinds)), 2)


def _written_when(hooks: Sequence[Hook]) -> Trigger:
    """When metrics are written: speed is measured at the same steps, so that it stands in the same lines."""
    chosen = [hook.when for kind in (Logging, SummarySaver) for hook in hooks if isinstance(hook, kind)]
    return chosen[0] if chosen else every(steps=100)
