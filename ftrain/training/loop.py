"""The loop: a pure step, driven over batches, with hooks around it, and never waiting for the host."""

import dataclasses
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from ftrain.cluster import PeerLostError, ProcessGroup, Sharding
from ftrain.coordination import Coordinator, call_all
from ftrain.data import Piece, Pipeline
from ftrain.data.shapes import ShapeWatch
from ftrain.training.agenda import Agenda
from ftrain.training.audience import Audience
from ftrain.training.compilation import use_compilation_cache
from ftrain.training.flight import Call, Flight
from ftrain.training.fusing import Fuse, Fuser, Taken
from ftrain.training.hook import DATA_ENDED, Hook, Report, check_hooks, feed_batch
from ftrain.training.intake import FINISHED, Intake
from ftrain.training.lookback import Lookback, Origin
from ftrain.training.memory import Memory
from ftrain.training.metrics import Metrics
from ftrain.training.objective import Batch
from ftrain.training.parallel import Parallel, spread
from ftrain.training.program import Program
from ftrain.training.recovery import Recoveries
from ftrain.training.replay import Past
from ftrain.training.reporting import with_progress
from ftrain.training.scaffold import Scaffold
from ftrain.training.signals import InterruptShield
from ftrain.training.state import TrainState
from ftrain.training.step import Step
from ftrain.training.stopping import Stopping
from ftrain.training.timing import Timing, clock
from ftrain.training.together import Together, check_group, check_program, check_shards


class Loop:
    """Runs `step` over `data` until a hook, the end of the data or `request_stop` ends it.

        with Loop(step, state, data, hooks=hooks) as loop:
            while not loop.should_stop():
                loop.advance()

    Entering starts the hooks, leaving ends them. After an exception `end` is not called; `close` always is. After
    KeyboardInterrupt (Ctrl-C, or a notebook's stop button) only the hooks that save are ended, so that the state after
    the newest step is saved before the exception goes on; `state` can be read afterwards.
    StopIteration and EndOfData, whoever raises them, end the run as the end of the data does.

    Args:
      state: to start from, or a function that makes it. A state stays usable, as the loop works on a copy, and is kept
        to recover from; a function is called again instead, and takes no memory.
      fuse: how many steps, up to the next one at which a hook is due, `advance` takes in one compiled call; "auto"
        finds out by measuring. Fused or not, hooks see the same, and the numbers are the same bit for bit: a trial
        makes sure of it, and steps whose bits it changes are not fused.
      scaffold: what is done to the state before the run starts with it.
      sharding: how the state lies on the mesh; without, all of it on every device.
      parallel: how the step is spread over the mesh; for "shard_map" and "pmap" make it with
        `make_step(replicas=axis_of(parallel))`. The state is then whole on every device.
      recoveries: how often, without getting further, a run goes on from the newest checkpoint, or from its start, after
        an error of the runtime that may go away ("ABORTED", "UNAVAILABLE").
      clock: tells the seconds that triggers and reports go by.
      group: the other processes of the job, if there are any; all of them make the same loop, and enter it. They stop
        together, whoever asks for it. Steps are not fused then, and errors not recovered from: a job is started again
        as a whole.
      straggler_timeout: seconds that a step waits for the data of this process. After that it goes on without: the
        replicas of this process count for nothing in it, and the data are used at the next step. For steps of replicas,
        see `parallel`, and an optimizer made by `sync_replicas`; such a run is not repeated exactly.
    """

    def __init__(
        self,
        step: Step,
        state: TrainState | Callable[[], TrainState],
        data: Pipeline | Iterable[Any],
        *,
        hooks: Sequence[Hook] = (),
        mesh: Mesh | None = None,
        fuse: Fuse = "auto",
        scaffold: Scaffold | None = None,
        sharding: Sharding | None = None,
        parallel: Parallel = "jit",
        recoveries: int = 3,
        clock: Callable[[], float] = time.monotonic,
        group: ProcessGroup | None = None,
        straggler_timeout: float | None = None,
    ):
        use_compilation_cache()
        check_group(group, mesh)
        self._together = Together(group) if group is not None and group.count > 1 else None
        if self._together is not None:
            check_shards(data, mesh)
            fuse, recoveries = 1, 0
        if parallel == "pmap" or straggler_timeout:
            fuse = 1
        if straggler_timeout and parallel == "jit":
            raise ValueError(
                'straggler_timeout needs parallel="shard_map": replicas that can be left out'
            )
        check_hooks(hooks)
        is_chief = group is None or group.is_chief
        self.timing = Timing()
        hooks = sorted(
            hooks, key=lambda hook: hook.saves_state
        )  # what is saved of a step is what all know of it
        chosen = [hook for hook in hooks if is_chief or not hook.chief_only]
        self._memory = Memory(hooks, chosen)
        self.hooks = with_progress(chosen, self.timing, lambda: self._count)
        self.start_step = 0  # the step that this loop went on from
        self.coordinator = Coordinator()
        self._data, self._fuse, self._clock = data, fuse, clock
        self._stopping = Stopping(self.coordinator, self._together)
        self._audience = Audience(self, self.hooks, self.timing)
        self._recoveries = Recoveries(recoveries)
        self._program = Program(step, mesh, parallel)
        self._fuser = Fuser(fuse, self._program)
        self._intake = Intake(
            data,
            self._program.put,
            self.hooks,
            self._together,
            straggler_timeout,
            stop=lambda: self._stopping.is_coming(self._count),
        )
        self._feeders = [
            hook for hook in self.hooks if type(hook).before_step is not Hook.before_step
        ]
        self._fed_shapes = ShapeWatch()
        self._origin = Origin(state, scaffold or Scaffold(), self.hooks, mesh, sharding)
        take, is_alone = spread(step, mesh, parallel), self._together is None
        self._lookback = Lookback(take, self._program, data, self._origin, self._feeders, is_alone)
        self._state: TrainState | None = None
        self._count = 0
        self._metrics = Metrics(0, 0)  # of the newest call
        self._flight = Flight(self._tell, self.timing, self._clock)
        self._agenda = Agenda(self.hooks)
        self._suspect: int | None = None  # the step that is being dispatched
        self._ending = False
        self._shield = InterruptShield()

    @property
    def state(self) -> TrainState:
        """The state after the newest step. The next step writes over it: copy what you keep."""
        if self._state is None:
            raise RuntimeError(
                f"enter it before its first step: with {type(self).__name__}(...) as run"
            )
        return self._state

    @property
    def steps_taken(self) -> int:
        """The number of the newest step, those before a restart included."""
        return self._count

    @property
    def stop_reason(self) -> str | None:
        """Why it ends, once that is known."""
        return self._stopping.reason

    @property
    def interrupted(self) -> bool:
        """Whether it ends early, and soon."""
        return self._stopping.interrupted

    @property
    def ending(self) -> bool:
        """True once the last step is done and the hooks' `end` is called."""
        return self._ending

    @property
    def saves(self) -> bool:
        """Whether a hook saves the state, so that it can be restored."""
        return any(hook.saves_state and not hook.follows_chief for hook in self.hooks)

    def report(self) -> Report:
        """What hooks are told after the newest step; reading its metrics waits for the device."""
        return self._audience.report(self._metrics, self._state)

    def should_stop(self) -> bool:
        return self._stopping.is_due(self._count)

    def request_stop(self, reason: str = "asked to") -> None:
        """End the loop before its next step, or, with other processes, as soon as they can too.

        The first reason given is kept.
        """
        self._stopping.ask(reason)

    def interrupt(self, reason: str) -> None:
        """End the loop soon: hooks save what they must at the end, and leave out what takes long."""
        self._stopping.ask(reason, interrupted=True)

    def notice(self, text: str) -> None:
        """Tell something to whoever follows the run."""
        self._audience.notice(text)

    def flush(self) -> None:
        """Have all hooks write out what still waits to be written."""
        self._audience.flush()

    def save(self, report: Report) -> None:
        """Have the hooks that save the state do so now."""
        self._audience.save(report)

    def flops(self) -> float | None:
        """Floating-point operations of one step as compiled, if the compiler tells."""
        return self._program.flops()

    def hook_states(self) -> dict[str, Mapping[str, Any]]:
        """What the hooks remember, as it is stored in a checkpoint."""
        return self._memory.collect()

    def past(self, step: int) -> Past:
        """An earlier step, to be looked at again."""
        return self._lookback.past(
            step,
            batch=functools.partial(self._batch_at_hand, step),
            state=lambda: self._state if step == self._count + 1 else None,
        )

    def step(self) -> None:
        """One step: dispatched to the device, not waited for."""
        self._guarded(lambda: self._take(1))

    def advance(self) -> None:
        """The steps up to the next one at which a hook is due, or a part of them, in one compiled call."""
        self._guarded(lambda: self._take(self._agenda.next_step - self._count))
        if self._fuser.trial is not None and self.stop_reason is None:
            self._guarded(self._explore)

    def __enter__(self) -> Self:
        if self._stopping.thread is not None:
            raise RuntimeError(
                f"a {type(self).__name__} can be entered once; make another to go on"
            )
        self._stopping.thread = threading.get_ident()
        self._shield.install()
        try:
            with self.timing.measure("starting"):
                self._guarded(self._begin, again=False)
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, FINISHED):
            self.request_stop(DATA_ENDED)
            error = None
        if isinstance(error, KeyboardInterrupt):
            try:
                self._end_interrupted(error)
            except KeyboardInterrupt as second:
                self._close(second)
                raise
        if error is None:
            try:
                self.coordinator.raise_requested_exception()
                self._guarded(self._end, again=False)
            except BaseException as failure:
                self._close(failure)
                raise
        self._close(error)
        return error is None

    def _guarded(self, take: Callable[[], None], *, again: bool = True) -> None:
        """Call `take`; after an error that can be retried, begin anew and, if it is to be called `again`, do so."""
        if again:
            self._stopping.check()
        while True:
            try:
                return take()
            except FINISHED:
                if not again:
                    raise
                return self._stopping.end_data(self._count)
            except Exception as error:
                if (
                    self._together is not None
                    and (cause := self._together.group.explain(error)) is not error
                ):
                    raise cause from None
                if not self._intake.can_go_on or not self._recoveries.allow(error, self._count):
                    raise
                if again:
                    self._guarded(functools.partial(self._begin, after=error), again=False)
                    if self.stop_reason is not None:
                        return None

    def _begin(self, after: Exception | None = None) -> None:
        """Start from the newest checkpoint, or from the beginning; also `after` an error."""
        before, self._suspect = self._count, None
        self._flight.clear()
        if after is not None:
            self._stopping.revoke()
        self._state = self._origin.state()
        self._count = int(self._state.step)
        if after is None:
            self.start_step = self._count
        else:
            self.notice(f"after step {before}: {after!s:.200}\ngoing on from step {self._count}")
        self._metrics = Metrics(self._count, self._count)
        self._metrics.time = self._clock()
        if (self._count or after is not None) and not isinstance(self._data, Pipeline):
            warnings.warn(
                f"resuming at step {self._count} with data that cannot be asked for a step: it gives its batches from "
                "where it stands; a Pipeline would repeat the run exactly",
                stacklevel=2,
            )
        self._begin_hooks(is_first=after is None)
        whens = [hook.when for hook in self.hooks]
        self._fuser.begin(whens, self._count)
        if isinstance(self._data, Iterator) and self._fuse == "auto":
            self._fuser.give_up()  # it may wait for steps to be taken, and fused ones need many batches beforehand
        changing = [*self._feeders, *self._intake.preparers]
        if changing and self._fuser.give_up():
            names = ", ".join(type(hook).__name__ for hook in changing)
            self.notice(
                f"steps are not fused: before each of them a hook changes the batch ({names})"
            )
        now = (
            self._clock()
            if self._together is None
            else self._together.begin(self._count, self._clock())
        )
        self._agenda = Agenda(self.hooks, self._count, now)
        self._intake.begin(self._count, whens, lambda: self._fuser.length)

    def _begin_hooks(self, *, is_first: bool) -> None:
        """Tell the hooks where the run starts, and give them what they remembered there."""
        report, reasons = self.report(), []
        strangers = self._memory.begin()
        for hook in self.hooks:
            hook.begin(report)
            reasons.append(self._memory.restore(hook))
        self._memory.started()
        if strangers and is_first:
            self.notice(
                f"the checkpoint has the state of hooks that this run does not have: {', '.join(strangers)}"
            )
        for reason in reasons:
            self._audience.stop_for(reason)

    def _take(self, most: float) -> None:
        """Take the next steps, at most so many."""
        started = clock()
        if self._state is None:
            raise RuntimeError(
                f"enter it before its first step: with {type(self).__name__}(...) as run"
            )
        piece = self._intake.take(self._count, most, self._fuser.kind)
        self.timing.data += clock() - started
        if self._together is not None and not self._together.go_on(self._count):
            self._intake.give_back([piece])
            return self._stopping.hear(self._count)
        return self._dispatch(piece)

    def _dispatch(self, piece: Piece) -> None:
        if self._feeders:
            batch = feed_batch(self._feeders, self.report(), piece.batch)
            if self._together is not None:  # each process feeds its part of an entry
                batch = {
                    k: v if isinstance(v, jax.Array) else self._program.put(v, 1)
                    for k, v in batch.items()
                }
            piece = dataclasses.replace(
                piece, batch=batch, kind=self._fed_shapes.kind(batch, self._count)
            )
        self._suspect, self._piece = self._count + 1, piece
        if not self._program.is_compiled(piece):
            with self.timing.measure("compiling"):
                lowered = self._program.lower(self.state, piece)
                if self._together is not None:
                    check_program(self._together.group, self._count + 1, lowered.as_text())
                self._program.finish(piece, lowered)
        started = clock()
        with self._shield:
            self._state, self._metrics = self._program(self.state, piece, self._count + 1)
            self._suspect = None
            self._count += piece.count
        self.timing.dispatch += clock() - started
        self._metrics.time = now = self._clock()
        if self._together is not None:
            now = self._together.agree_on_time(self._count, now, self._agenda.next_time)
        self._flight.add(Call(self._metrics, piece, self._agenda.due(self._count, now)))

    def _tell(self, call: Call) -> None:
        """Tell the hooks of a call that is finished."""
        self._audience.tell(call, self._state)
        if call.due:
            self._agenda.look_ahead(self._count)  # they may have changed their triggers

    def _explore(self) -> None:
        """Find out whether fused steps are faster, if it is time to."""
        trial = self._fuser.trial
        if trial is None:
            return
        if trial.is_mark():
            self._flight.settle()
            self._fuser.explore(self.timing, self.state, self._piece)
        problem = self._fuser.problem()
        if problem:
            self.notice(problem)
        elif trial.is_ready() and self._agenda.next_step - self._count >= trial.length:
            pieces = self._intake.take_singles(trial.length)
            self._flight.settle()
            fused = trial.take(self.state, pieces) if pieces else None
            notice = self._fuser.judge(fused, self._take_singly(pieces))
            if notice:
                self.notice(notice)

    def _take_singly(self, pieces: list[Piece]) -> Taken | None:
        """Take steps one by one; None if a hook stops the run before they are all taken."""
        spent, metrics = self.timing.dispatch + self.timing.device, []
        for number, piece in enumerate(pieces):
            if self.stop_reason is not None:
                self._intake.give_back(pieces[number:])
                return None
            self._dispatch(piece)
            metrics.append(self._metrics)
        self._flight.settle()
        seconds = self.timing.dispatch + self.timing.device - spent
        return Taken(
            self.state, np.concatenate([each.table() for each in metrics] or [np.zeros(0)]), seconds
        )

    def _end(self) -> None:
        self._stopping.catch_up(lambda: self._count, lambda: self._take(1))
        self._intake.end(self._count)
        while True:
            try:
                self._flight.settle()
                break
            except FINISHED:  # the run is ending anyway: go on with what is left
                continue
        self._ending = True
        self._audience.tell_end(self._metrics, self._state)

    def _end_interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """After Ctrl-C: have the hooks that save do so, once the steps in flight are finished."""
        if (
            self._together is not None or self._state is None
        ):  # several processes can save only together
            return
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            interrupt.add_note(
                f"the state after step {self._count} is lost: the interrupt came while a step was writing over it; "
                "the newest checkpoint, if there is one, is as it was"
            )
            return
        if not self.saves:
            interrupt.add_note(
                f"the state after step {self._count} is not saved, as no hook saves; `state` has it"
            )
            return
        self.interrupt("KeyboardInterrupt")
        try:
            if (
                step := int(self._state.step)
            ) != self._metrics.last:  # it was going back to an earlier step
                self._count, self._metrics = step, Metrics(step, step)
                self._flight.clear()
            self._flight.settle()
            report = self._audience.report(self._metrics, self._state, self.hooks)
            call_all(
                [functools.partial(hook.end, report) for hook in self.hooks if hook.saves_state]
            )
        except Exception as failure:  # noqa: BLE001 - the interrupt goes on
            interrupt.add_note(
                f"the state after step {self._count} could not be saved: {failure!r}"
            )
        else:
            interrupt.add_note(f"the state after step {self._count} is saved")

    def _batch_at_hand(self, step: int) -> Batch | None:
        """The batch that a step was given, if it is still here."""
        if step == self._suspect:
            return self._piece.split()[0].batch
        return self._flight.batch_of(step)

    def _tell_failure(self, error: Exception) -> None:
        step = getattr(error, "step", None)
        if not isinstance(step, int):  # it is not one that names its step
            step = self._suspect or self._flight.suspect
        self._audience.tell_failure(error, None if step is None else self.past(step))

    def _close(self, error: BaseException | None) -> None:
        """Close all that is open. What fails in it never hides the error that ended the run."""
        if error is not None and self._together is not None:
            self._together.group.fail(
                error
            )  # first, because others may wait for this process, and it for them
        closing: list[Callable[[], None]] = [self._intake.close]
        if (
            isinstance(error, Exception)
            and not isinstance(error, PeerLostError)
            and self._state is not None
        ):
            closing.append(functools.partial(self._tell_failure, error))
        closing += [
            *(hook.close for hook in reversed(self.hooks)),
            self._fuser.close,
            self._shield.remove,
        ]
        try:
            call_all([*closing, self.coordinator.request_stop, self.coordinator.join])
        except Exception as failure:
            if error is None:
                raise
            if failure is not error:
                error.add_note(f"closing failed too: {failure!r}")
