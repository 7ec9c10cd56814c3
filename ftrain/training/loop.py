"""The training loop: takes batches, dispatches steps, and calls hooks when the steps are finished."""

import dataclasses
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import Mesh

from ftrain.cluster import PeerLostError, ProcessGroup, Sharding
from ftrain.coordination import Coordinator, call_all
from ftrain.data import Piece, Pipeline
from ftrain.data.shapes import ShapeWatch
from ftrain.training.compiled_step import CompiledStep, Parallel, spread, use_compilation_cache
from ftrain.training.consensus import Consensus, check_group, check_program, check_shards
from ftrain.training.feed import FINISHED, Feed
from ftrain.training.fusion import Fuse, Fuser
from ftrain.training.hook import DATA_ENDED, Hook, Report, check_hooks, feed_batch
from ftrain.training.hook_dispatch import Call, CallsInFlight, HookDispatch, HookMemory
from ftrain.training.loss import Batch
from ftrain.training.metrics import Metrics
from ftrain.training.recovery import Recoveries, Scaffold, StartPoint
from ftrain.training.replay import PastStep, Replayer
from ftrain.training.reporting import with_progress
from ftrain.training.signals import InterruptShield
from ftrain.training.state import TrainState
from ftrain.training.step import Step
from ftrain.training.stopping import Stopping
from ftrain.training.timing import Timing, clock
from ftrain.training.trigger import HookSchedule


class Loop:
    """Runs `step` over `data` until a hook, the end of the data or `request_stop` ends it.

        with Loop(step, state, data, hooks=hooks) as loop:
            while not loop.should_stop():
                loop.advance()

    Entering starts the hooks, leaving ends them. After an exception `end` is not called; `close`
    always is. After KeyboardInterrupt (Ctrl-C, or a notebook's stop button) only the hooks that save
    are ended: the state after the newest step is saved, then the exception is raised again, and
    `state` can still be read. StopIteration and EndOfData, raised anywhere, end the run cleanly.

    Args:
      state: the initial state, or a function that makes it. The loop works on a copy of a state and
        keeps the original to recover from; a function is called again instead and takes no memory.
      fuse: how many steps, up to the next one at which a hook is due, `advance` takes in one compiled
        call; "auto" measures it. Hooks see the same and the numbers are the same bit for bit: a
        trial checks that, and steps whose bits would change are not fused.
      scaffold: how the state is prepared before the run starts.
      sharding: how the state is sharded over the mesh; by default every device has all of it.
      parallel: how the step is spread over the mesh. For "shard_map" and "pmap" make the step with
        `make_step(replicas=axis_of(parallel))`; every device then has the whole state.
      recoveries: how often, without getting further, a run restarts from the newest checkpoint, or
        from its initial state, after a transient runtime error ("ABORTED", "UNAVAILABLE").
      clock: returns the time in seconds for triggers and reports.
      group: the other processes of the job. All of them make and enter the same loop, and stop
        after the same step. Steps are not fused then, and errors are not recovered from: the job is
        restarted as a whole.
      straggler_timeout: seconds that a step waits for the data of this process. Then the step runs
        without them: the replicas of this process do not contribute, and the data are used at the
        next step. Needs a step of replicas, see `parallel`, and an optimizer made by
        `sync_replicas`. Such a run is not repeated exactly.
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
        self._consensus = Consensus(group) if group is not None and group.count > 1 else None
        if self._consensus is not None:
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
        )  # savers last: they save what the others know
        chosen = [hook for hook in hooks if is_chief or not hook.chief_only]
        self._memory = HookMemory(hooks, chosen)
        self.hooks = with_progress(chosen, self.timing, lambda: self._count)
        self.start_step = 0  # the step that this run started or resumed from
        self.coordinator = Coordinator()
        self._data = data
        self._fuse = fuse
        self._clock = clock
        self._stopping = Stopping(self.coordinator, self._consensus)
        self._hook_calls = HookDispatch(self, self.hooks, self.timing)
        self._recoveries = Recoveries(recoveries)
        self._compiled = CompiledStep(step, mesh, parallel)
        self._fuser = Fuser(fuse, self._compiled)
        self._feed = Feed(
            data,
            self._compiled.put,
            self.hooks,
            self._consensus,
            straggler_timeout,
            self._stopping,
        )
        self._feeders = [
            hook for hook in self.hooks if type(hook).before_step is not Hook.before_step
        ]
        self._fed_shapes = ShapeWatch()
        self._start_point = StartPoint(state, scaffold or Scaffold(), self.hooks, mesh, sharding)
        self._replayer = Replayer(
            spread(step, mesh, parallel),
            self._compiled,
            data,
            self._start_point.state,
            batches_change=bool(self._feeders),
            is_alone=self._consensus is None,
        )
        self._state: TrainState | None = None
        self._count = 0
        self._metrics = Metrics(0, 0)  # of the newest call
        self._in_flight = CallsInFlight(self._settled, self.timing, self._clock)
        self._schedule = HookSchedule(self.hooks)
        self._suspect: int | None = None  # the step that is being dispatched
        self._ending = False
        self._shield = InterruptShield()

    @property
    def state(self) -> TrainState:
        """The state after the newest step. The next step overwrites it: copy what you keep."""
        if self._state is None:
            raise RuntimeError(
                f"enter it before its first step: with {type(self).__name__}(...) as run"
            )
        return self._state

    @property
    def steps_taken(self) -> int:
        """The number of the newest step, counted from the start of the training."""
        return self._count

    @property
    def stop_reason(self) -> str | None:
        """The reason to stop, once there is one."""
        return self._stopping.reason

    @property
    def interrupted(self) -> bool:
        """True once an interrupt was requested."""
        return self._stopping.interrupted

    @property
    def ending(self) -> bool:
        """True once the last step is done and the hooks' `end` is called."""
        return self._ending

    @property
    def saves(self) -> bool:
        """Whether a hook saves the state."""
        return any(hook.saves_state and not hook.follows_chief for hook in self.hooks)

    def report(self) -> Report:
        """The report of the newest step; reading its metrics waits for the device."""
        return self._hook_calls.report(self._metrics, self._state)

    def should_stop(self) -> bool:
        """Whether the newest step was the last one."""
        return self._stopping.is_due(self._count)

    def request_stop(self, reason: str = "asked to") -> None:
        """Stop before the next step or, with other processes, at the next step they agree on.

        The first reason given is kept.
        """
        self._stopping.ask(reason)

    def interrupt(self, reason: str) -> None:
        """Stop soon: at the end hooks save, and skip what takes long."""
        self._stopping.ask(reason, interrupted=True)

    def notice(self, text: str) -> None:
        """Show a message to the user, through the hooks that write a log."""
        self._hook_calls.notice(text)

    def flush(self) -> None:
        """Have all hooks finish their pending writes."""
        self._hook_calls.flush()

    def save(self, report: Report) -> None:
        """Have the hooks that save the state do so now."""
        self._hook_calls.save(report)

    def flops(self) -> float | None:
        """Floating-point operations of one compiled step, if the compiler reports them."""
        return self._compiled.flops()

    def hook_states(self) -> dict[str, Mapping[str, Any]]:
        """The states of the hooks, as stored in a checkpoint."""
        return self._memory.collect()

    def past(self, step: int) -> PastStep:
        """An earlier step, to be inspected or taken again."""
        return self._replayer.past(
            step,
            batch=functools.partial(self._batch_at_hand, step),
            state=lambda: self._state if step == self._count + 1 else None,
        )

    def step(self) -> None:
        """Dispatch one step to the device, without waiting for it."""
        self._guarded(lambda: self._take(1))

    def advance(self) -> None:
        """Dispatch the steps up to the next one at which a hook is due, fused as far as possible."""
        self._guarded(lambda: self._take(self._schedule.next_step - self._count))
        if not self._fuser.is_decided and self.stop_reason is None:
            self._guarded(self._explore)

    def __enter__(self) -> Self:
        if self._stopping.thread is not None:
            raise RuntimeError(f"a {type(self).__name__} can be entered once; make another one")
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
        """Call `take`. After a transient error restart the run and, with `again`, call it again."""
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
                    self._consensus is not None
                    and (cause := self._consensus.group.explain(error)) is not error
                ):
                    raise cause from None
                if not self._feed.can_resume or not self._recoveries.allow(error, self._count):
                    raise
                if again:
                    self._guarded(functools.partial(self._begin, after=error), again=False)
                    if self.stop_reason is not None:
                        return None

    def _begin(self, after: Exception | None = None) -> None:
        """Start from the newest checkpoint or the initial state; also `after` an error."""
        before = self._count
        self._suspect = None
        self._in_flight.clear()
        if after is not None:
            self._stopping.revoke()
        self._state = self._start_point.state()
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
        changing = [*self._feeders, *self._feed.preparers]
        if changing and self._fuser.give_up():
            names = ", ".join(type(hook).__name__ for hook in changing)
            self.notice(
                f"steps are not fused: before each of them a hook changes the batch ({names})"
            )
        now = (
            self._clock()
            if self._consensus is None
            else self._consensus.begin(self._count, self._clock())
        )
        self._schedule = HookSchedule(self.hooks, self._count, now)
        self._feed.start(self._count, whens, lambda: self._fuser.length)

    def _begin_hooks(self, *, is_first: bool) -> None:
        """Call `begin` of the hooks, and restore their states."""
        report = self.report()
        reasons: list[str | None] = []
        unknown = self._memory.begin()
        for hook in self.hooks:
            hook.begin(report)
            reasons.append(self._memory.restore(hook))
        self._memory.started()
        if unknown and is_first:
            self.notice(
                f"the checkpoint has the state of hooks that this run does not have: {', '.join(unknown)}"
            )
        for reason in reasons:
            self._hook_calls.stop_for(reason)

    def _take(self, limit: float) -> None:
        """Take the next steps, at most `limit` of them."""
        started = clock()
        if self._state is None:
            raise RuntimeError(
                f"enter it before its first step: with {type(self).__name__}(...) as run"
            )
        piece = self._feed.take(self._count, limit, self._fuser.kind)
        self.timing.data += clock() - started
        if self._consensus is not None and not self._consensus.go_on(self._count):
            self._feed.give_back([piece])
            return self._stopping.hear(self._count)
        return self._dispatch(piece)

    def _dispatch(self, piece: Piece) -> None:
        if self._feeders:
            batch = feed_batch(self._feeders, self.report(), piece.batch)
            if self._consensus is not None:  # each process feeds its part of an entry
                batch = {
                    k: v if isinstance(v, jax.Array) else self._compiled.put(v, 1)
                    for k, v in batch.items()
                }
            piece = dataclasses.replace(
                piece, batch=batch, kind=self._fed_shapes.kind(batch, self._count)
            )
        self._suspect, self._piece = self._count + 1, piece
        if not self._compiled.is_compiled(piece):
            with self.timing.measure("compiling"):
                lowered = self._compiled.lower(self.state, piece)
                if self._consensus is not None:
                    check_program(self._consensus.group, self._count + 1, lowered.as_text())
                self._compiled.finish(piece, lowered)
        started = clock()
        with self._shield:
            self._state, self._metrics = self._compiled(self.state, piece, self._count + 1)
            self._suspect = None
            self._count += piece.count
        self.timing.dispatch += clock() - started
        self._metrics.time = now = self._clock()
        if self._consensus is not None:
            now = self._consensus.agree_on_time(self._count, now, self._schedule.next_time)
        self._in_flight.add(Call(self._metrics, piece, self._schedule.due(self._count, now)))

    def _settled(self, call: Call) -> None:
        """Call the hooks after a call is finished."""
        self._hook_calls.after_call(call, self._state)
        if call.due:
            self._schedule.look_ahead(self._count)  # hooks may have changed their triggers

    def _explore(self) -> None:
        """Find out, a little after each call, whether fused steps are exact and faster."""
        if self._fuser.is_due():
            self._in_flight.settle()
            message = self._fuser.explore(self.timing, self.state, self._piece)
            if message:
                self.notice(message)

    def _end(self) -> None:
        self._stopping.catch_up(lambda: self._count, lambda: self._take(1))
        self._feed.finish(self._count)
        while True:
            try:
                self._in_flight.settle()
                break
            except FINISHED:  # the run is ending anyway: settle the rest
                continue
        self._ending = True
        self._hook_calls.end(self._metrics, self._state)

    def _end_interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """After Ctrl-C: finish the steps in flight, then have the hooks that save do so."""
        if (
            self._consensus is not None or self._state is None
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
                self._in_flight.clear()
            self._in_flight.settle()
            report = self._hook_calls.report(self._metrics, self._state, self.hooks)
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
        """The batch of a step, if it is still in memory."""
        if step == self._suspect:
            return self._piece.split()[0].batch
        return self._in_flight.batch_of(step)

    def _tell_failure(self, error: Exception) -> None:
        step = getattr(error, "step", None)
        if not isinstance(step, int):  # it is not one that names its step
            step = self._suspect or self._in_flight.suspect
        self._hook_calls.failed(error, None if step is None else self.past(step))

    def _close(self, error: BaseException | None) -> None:
        """Close everything. An error in it never hides the error that ended the run."""
        if error is not None and self._consensus is not None:
            self._consensus.group.fail(
                error
            )  # first, because others may wait for this process, and it for them
        closing: list[Callable[[], None]] = [self._feed.close]
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
