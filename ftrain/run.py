"""A run: the loop with a directory and the default hooks."""

import dataclasses
import functools
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from ftrain.checkpoints import WarmStart, hold
from ftrain.checkpoints.hand_over import RECORD, as_warm_start
from ftrain.checkpoints.paths import CHECKPOINTS
from ftrain.cluster import ProcessGroup
from ftrain.data import Pipeline
from ftrain.hooks import (
    CheckpointSaver,
    CrashBundle,
    DataFingerprint,
    LogFile,
    Logging,
    ProgressBar,
    StepCounter,
    StopAtStep,
    StopOnNaN,
    SummarySaver,
)
from ftrain.hooks.checkpoint import LOCK
from ftrain.launching.reporter import reporter_of_this_process
from ftrain.models import Model
from ftrain.optimizers import LearningRate
from ftrain.paths import RUN_CONFIG, RUN_LOCK, local_path
from ftrain.schedules import Schedule
from ftrain.storage import exists
from ftrain.training import (
    Hook,
    Loop,
    Scaffold,
    TrainState,
    Trigger,
    every,
    make_step,
    stop_on_signals,
)
from ftrain.training.arguments import check_arrays, check_optimizer
from ftrain.training.compiled_step import CompiledStep, axis_of
from ftrain.training.consensus import LIMIT
from ftrain.training.loss import LossFunction
from ftrain.training.options import LoopOptions, check_options
from ftrain.training.pieces import Piece
from ftrain.training.precision import Precision
from ftrain.training.record import Recorder, RunMismatchError, RunRecord, set_aside
from ftrain.training.remat import Remat
from ftrain.training.state import Initial
from ftrain.training.step import Step
from ftrain.tree import Tree

LOGS = "logs"  # the directory for the logs of processes other than the first


class Run(Loop):
    """A loop that measures, logs and stops at NaN; with a directory it saves and writes summaries.

        with ftrain.Run(step, state, data, steps=1000, directory="runs/mine") as run:
            while not run.should_stop():
                run.advance()

    `advance` takes the steps up to the next one at which a hook is due, or a part of them, in one
    compiled call; `step` takes exactly one.

    `hooks` are added to the default ones; a hook of the class of a default one replaces it, for
    example `CheckpointSaver("runs/mine/checkpoints", when=every(steps=50))`. A new run in the same
    directory resumes from the newest checkpoint. If it was trained with another step or other data,
    RunMismatchError lists the differences before a step is taken; more `steps` are allowed.

    After KeyboardInterrupt (Ctrl-C, or a notebook's stop button) the state after the newest step is
    saved in the directory, and the exception is raised again. Without a directory nothing is saved;
    `run.state` still has it.

    Args:
      accept_changes: resume a run that was trained with another step or other data.
      overwrite: start again in a directory that has a run. Nothing is deleted: the files of the run
        are moved to `directory.1`, or the next unused number.
      options: see `LoopOptions`.
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
        accept_changes: bool = False,
        overwrite: bool = False,
        **options: Unpack[LoopOptions],
    ):
        check_options(options, "steps", "directory", "accept_changes", "overwrite")
        group = options.get("group")
        scaffold = options.get("scaffold")
        home = None if directory is None else local_path(directory)
        if group is not None and home is not None:
            group.check_directory(home)  # now, before a first save waits for the others
        waits = scaffold is not None and scaffold.wait_secs is not None
        hooks = _complete(hooks, steps, home, data, writes=not waits)
        if group is not None and not group.is_chief and home is not None:
            hooks.append(
                LogFile(home / LOGS / f"process_{group.index}.log", when=_written_when(hooks))
            )
        reporter = reporter_of_this_process()
        if reporter.is_supervised:
            index = 0 if group is None else group.index
            reporter.log = None if home is None else home / LOGS / f"process_{index}.log"
            reporter.steps = steps
        record = None
        if home is not None and not waits:
            record = _DirectoryRecord(
                home,
                step,
                state,
                data,
                savers=[hook for hook in hooks if isinstance(hook, CheckpointSaver)],
                steps=steps,
                group=group,
                accept_changes=accept_changes,
                overwrite=overwrite,
            )
        elif overwrite:
            raise ValueError("overwrite=True needs directory=..., and no Scaffold(wait_secs=...)")
        super().__init__(step, state, data, hooks=hooks, record=record, **options)


class _DirectoryRecord(Recorder):
    """The record of a run in its directory, unless the directory has a config: see `Recorder`."""

    def __init__(
        self,
        home: Path,
        step: Step,
        initial: TrainState | Callable[[], TrainState],
        data: Pipeline | Iterable[Any],
        *,
        savers: Sequence[CheckpointSaver],
        steps: int | None,
        group: ProcessGroup | None,
        accept_changes: bool,
        overwrite: bool,
    ):
        self._home = home
        self._step = step
        self._initial = initial
        self._data = data
        self._savers = savers
        self._steps = steps
        self._group = group
        self._is_chief = group is None or group.is_chief
        self._accept_changes = accept_changes
        self._overwrite = overwrite
        self._record: RunRecord | None = None
        self._is_written = True

    @property
    def is_written(self) -> bool:
        return self._is_written

    def check(self, program: CompiledStep, notice: Callable[[str], None]) -> None:
        home = self._home
        if self._overwrite:
            if self._is_chief:
                self._set_aside(notice)
            if self._group is not None:
                self._group.barrier(f"{home} is set aside", LIMIT)
        if exists(home / RUN_CONFIG):  # the command line compares the configs instead
            return
        settings = self._initial.settings if isinstance(self._initial, Initial) else {}
        record = RunRecord(home, self._step, program, self._data, settings)
        self._record = record
        self._is_written = not self._is_chief
        if not any(saver.manager.latest() is not None for saver in self._savers):
            return
        differences = record.find_differences(self._shapes)
        if differences and not self._accept_changes:
            raise RunMismatchError(home, differences)
        self._is_written = not self._is_chief or record.is_current
        if differences:
            notice(f"{home} is resumed with changes: {'; '.join(differences)}")

    def started(self, step: int, notice: Callable[[str], None]) -> None:
        if self._record is not None and self._steps is not None and step >= self._steps:
            notice(
                f"nothing is left to do: {self._home} has {step} steps already; pass "
                "more steps, overwrite=True to start again, or another directory"
            )

    def write(self, state: TrainState, piece: Piece, notice: Callable[[str], None]) -> None:
        """Write what the run is, now that its first batch is known; a failure is no error."""
        self._is_written = True
        batch = jax.tree.map(_shape, piece.batch)
        if piece.count > 1:
            batch = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch
            )
        try:
            if self._record is not None:
                self._record.write(jax.tree.map(_shape, state), batch)
        except Exception as error:  # noqa: BLE001 - of the disk, or of a step that cannot be traced
            notice(f"{self._home}: the record of the run cannot be written: {error}")

    def _set_aside(self, notice: Callable[[str], None]) -> None:
        home = self._home
        with ExitStack() as locks:
            for path in (home / RUN_LOCK, home / CHECKPOINTS / LOCK):
                if exists(path):
                    locks.enter_context(hold(path, f"{home} is in use"))
            aside = set_aside(home)
        if aside is not None:
            notice(f"the run in {home} was set aside as {aside}")

    def _shapes(self) -> TrainState:
        initial = self._initial
        if isinstance(initial, Initial) and initial.like is not None:
            # Without shardings, as they are written: fingerprints would have them.
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), initial.like()
            )
        return jax.eval_shape(initial if callable(initial) else lambda: initial)


def train(
    loss_fn: LossFunction,
    params: Tree | Model,
    data: Pipeline | Iterable[Any],
    *,
    optimizer: optax.GradientTransformation,
    steps: int | None = None,
    epochs: float | None = None,
    hooks: Sequence[Hook] = (),
    directory: str | Path | None = None,
    seed: int = 0,
    clip_global_norm: float | Schedule | None = None,
    accumulate: int = 1,
    averages: float | Schedule | None = None,
    averages_ramp: bool = False,
    averages_of: str | Sequence[str] = (),
    merge_rows: bool = True,
    precision: Precision | str | None = None,
    remat: Remat = "none",
    learning_rate: LearningRate | None = None,
    model_state: Tree | None = None,
    warm_start: WarmStart | str | Path | None = None,
    accept_changes: bool = False,
    overwrite: bool = False,
    **options: Unpack[LoopOptions],
) -> TrainState:
    """Train `params` to minimise `loss_fn(params, batch, rng)` and return the final state.

    `params` is a tree of arrays, or an `ftrain.models.Model`, which is initialised from the seed
    and has its own model state. With a `model_state`, such as the statistics of batch
    normalisation, the loss function is called as `loss_fn(params, batch, rng, model_state)` and
    returns `(loss, metrics, model_state)`.

    Ends after `steps` steps, or after `epochs` of a pipeline, at the end of the data, or if a hook
    stops it. With a `directory`, an interrupted run resumes from its newest checkpoint; Ctrl-C
    saves one before it raises KeyboardInterrupt. Without one, Ctrl-C loses the state; `Run` keeps
    it as its `state`.

    A run that has no checkpoint to resume from takes the parameters and the model state of the
    checkpoint `warm_start`, if that is given; see `WarmStart`.

    A directory that has a run with another loss, optimizer, data or seed is refused with
    RunMismatchError; `accept_changes` and `overwrite` are those of `Run`. `averages_of` are
    patterns for the parameters to average, all of them by default. `clip_global_norm`,
    `accumulate`, `averages`, `averages_ramp`, `merge_rows`, `precision`, `remat` and
    `learning_rate` are those of `make_step`; `options` are those of `Loop`, see `LoopOptions`.
    """
    check_optimizer(optimizer)  # now, before anything is written
    if not isinstance(params, Model):
        check_arrays("params", params)
    steps = _length(steps, epochs, data)
    _check_ends(steps, data, hooks)
    create = functools.partial(
        TrainState.create,
        params,
        optimizer,
        seed=seed,
        model_state=model_state,
        averages=(averages_of or True) if averages else False,
        precision=precision,
    )
    settings: dict[str, Any] = {"seed": seed} if isinstance(seed, int) else {}
    if warm_start is not None:
        chosen = as_warm_start(warm_start)
        settings["warm_start"] = chosen.summary()

        def renew(state: TrainState) -> TrainState:
            own = {"seed": state.rng, "model_state": state.model_state}
            return TrainState.create(state.params, optimizer, **{**create.keywords, **own})

        home = None if directory is None else local_path(directory)
        options["scaffold"] = with_warm_start(options, chosen, renew, home)
    run = Run(
        make_step(
            loss_fn,
            optimizer,
            clip_global_norm=clip_global_norm,
            accumulate=accumulate,
            averages=averages,
            averages_ramp=averages_ramp,
            merge_rows=merge_rows,
            precision=precision,
            remat=remat,
            learning_rate=learning_rate,
            replicas=axis_of(options.get("parallel", "jit")),
        ),
        Initial(create, settings=settings),
        data,
        steps=steps,
        hooks=hooks,
        directory=directory,
        accept_changes=accept_changes,
        overwrite=overwrite,
        **options,
    )
    with stop_on_signals(run.interrupt, [signal.SIGINT], saves=run.saves), run:
        while not run.should_stop():
            run.advance()
    if run.interrupted:
        saved = "saved: the same call resumes" if run.saves else "not saved: pass a directory"
        raise KeyboardInterrupt(f"stopped after step {run.steps_taken}, {saved}")
    return run.state


def _length(steps: int | None, epochs: float | None, data: Any) -> int | None:
    """Return the number of steps of a run."""
    if epochs is None:
        return steps
    if steps is not None:
        raise ValueError(f"pass steps or epochs, not both; got steps={steps} and epochs={epochs}")
    if not isinstance(data, Pipeline):
        raise TypeError(
            "epochs needs a Pipeline, which knows its number of examples, "
            f"got {type(data).__name__}; pass steps"
        )
    return data.count_steps(epochs)


def _check_ends(steps: int | None, data: Any, hooks: Sequence[Hook]) -> None:
    """Raise ValueError if a run would never end."""
    is_endless = isinstance(data, Pipeline) and data.steps is None
    if steps is None and is_endless and not hooks:
        raise ValueError(
            "the run would never end: pass steps=..., epochs=..., a Pipeline(epochs=...), "
            "or a hook that stops it"
        )


def with_warm_start(
    options: LoopOptions,
    warm_start: WarmStart,
    renew: Callable[[TrainState], TrainState],
    directory: Path | None,
) -> Scaffold:
    """The scaffold of these options, which starts a new run from a checkpoint.

    `renew` makes the state again from one with new parameters. An `init_fn` of the scaffold is
    called after it.
    """
    scaffold = options.get("scaffold") or Scaffold()
    group = options.get("group")
    is_chief = group is None or group.is_chief
    record = directory / RECORD if directory is not None and is_chief else None

    def start(state: TrainState) -> TrainState:
        started = warm_start.start(state, renew, record)
        return started if scaffold.init_fn is None else scaffold.init_fn(started)

    return dataclasses.replace(scaffold, init_fn=start)


def _complete(
    hooks: Sequence[Hook], steps: int | None, directory: Path | None, data: Any, *, writes: bool
) -> list[Hook]:
    """Return the given hooks and the default ones.

    A process that waits for the checkpoints of another does not write to the directory of that one.
    """
    complete: list[Hook] = list(hooks)

    def add_unless_given(hook: Hook, *kinds: type[Hook]) -> None:
        if not any(isinstance(given, (type(hook), *kinds)) for given in hooks):
            complete.append(hook)

    if directory is not None:
        add_unless_given(CheckpointSaver(directory / CHECKPOINTS))
    if directory is not None and writes:
        add_unless_given(SummarySaver(directory))
        add_unless_given(CrashBundle(directory))
        if isinstance(data, Pipeline):
            add_unless_given(DataFingerprint(directory, data))
    add_unless_given(Logging(), ProgressBar)
    add_unless_given(StopOnNaN())
    add_unless_given(StepCounter(when=_written_when(complete)))
    if steps is not None:
        complete.append(StopAtStep(steps))
    return complete


def _written_when(hooks: Sequence[Hook]) -> Trigger:
    """Return when metrics are written: speed is measured then, to be in the same lines."""
    chosen = [
        hook.when for kind in (Logging, SummarySaver) for hook in hooks if isinstance(hook, kind)
    ]
    return chosen[0] if chosen else every(steps=100)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
