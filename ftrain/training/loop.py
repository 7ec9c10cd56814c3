"""The training loop: take batches, dispatch steps, call hooks when the steps are finished."""

import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from ftrain.cluster import PeerLostError
from ftrain.coordination import Coordinator, call_all
from ftrain.data import Pipeline
from ftrain.training.compiled_step import CompiledStep, spread, use_compilation_cache
from ftrain.training.consensus import LIMIT, Consensus, check_group, check_program, check_shards
from ftrain.training.feed import FINISHED, Feed
from ftrain.training.fusion import Fuser
from ftrain.training.hook import Hook, Report, StateSaver, check_hooks
from ftrain.training.hook_dispatch import DispatchedCall, HookDispatch, HookMemory, Position
from ftrain.training.options import LoopOptions, check_options
from ftrain.training.record import Recorder
from ftrain.training.recovery import Recoveries, Scaffold, StartPoint
from ftrain.training.replay import Replayer
from ftrain.training.reporting import with_progress
from ftrain.training.state import TrainState
from ftrain.training.step import Step
from ftrain.training.step_metrics import StepMetrics, Timing, clock
from ftrain.training.stopping import DATA_ENDED, InterruptShield, Stopping
from ftrain.training.trigger import HookSchedule


class Loop:
    """Runs `step` over `data` until a hook, the end of the data or `request_stop` ends it.

        with Loop(step, state, data, hooks=hooks) as loop:
            while not loop.should_stop():
                loop.advance()

    Entering starts the hooks, leaving ends them. After an exception `end` is not called; `close`
    always is. After KeyboardInterrupt (Ctrl-C, or a notebook's stop button) only the hooks that
    save are ended: the state after the newest step is saved, then the exception is raised again,
    and `state` can still be read. StopIteration and EndOfData, raised anywhere, end the run
    cleanly.

    Args:
      state: the initial state, or a function that makes it. The loop works on a copy of a state and
        keeps the original to recover from; a function is called again instead and takes no memory.
      hooks: called in the order of their `order`, and else as given.
      record: knows whether a run that is to be resumed is this one.
      options: see `LoopOptions`.
    """

    def __init__(
        self,
        step: Step,
        state: TrainState | Callable[[], TrainState],
        data: Pipeline | Iterable[Any],
        *,
        hooks: Sequence[Hook] = (),
        record: Recorder | None = None,
        **options: Unpack[LoopOptions],
    ):
        use_compilation_cache()
        check_options(options)
        check_hooks(hooks)
        mesh = options.get("mesh")
        parallel = options.get("parallel", "jit")
        group = options.get("group")
        scaffold = options.get("scaffold") or Scaffold()
        straggler_timeout = options.get("straggler_timeout")
        check_group(group, mesh)
        if straggler_timeout and parallel == "jit":
            raise ValueError(
                'straggler_timeout needs parallel="shard_map": replicas that can be left out'
            )
        self._consensus = Consensus(group) if group is not None and group.count > 1 else None
        if self._consensus is not None:
            check_shards(data, mesh)
        can_fuse = self._consensus is None and parallel != "pmap" and not straggler_timeout
        self._fuse = options.get("fuse", "auto") if can_fuse else 1
        self._recoveries = Recoveries(
            options.get("recoveries", 3) if self._consensus is None else 0
        )
        hooks = sorted(hooks, key=lambda hook: hook.order)
        own = [hook for hook in hooks if group is None or group.is_chief or not hook.chief_only]
        self.timing = Timing()
        self.coordinator = Coordinator()
        self.start_step = 0  # the step that this run started or resumed from
        self._position = Position()
        self.hooks = with_progress(own, self.timing, self._position)
        self.saves = scaffold.wait_secs is None and any(
            isinstance(hook, StateSaver) for hook in own
        )
        self._data = data
        self._record = record
        self._clock = options.get("clock", time.monotonic)
        self._stopping = Stopping(self.coordinator, self._consensus)
        self._compiled = CompiledStep(step, mesh, parallel)
        self._fuser = Fuser(self._fuse, self._compiled)
        self._feed = Feed(
            data,
            self._compiled.put,
            options.get("prepare"),
            self._consensus,
            straggler_timeout,
            self._stopping,
        )
        self._batch_hooks = [hook for hook in self.hooks if hook.changes_batch]
        self._start_point = StartPoint(state, scaffold, self.hooks, mesh, options.get("sharding"))
        self._schedule = HookSchedule(self.hooks)
        replayer = Replayer(
            spread(step, mesh, parallel),
            self._compiled,
            data,
            self._start_point.state,
            batches_change=bool(self._batch_hooks),
            is_alone=self._consensus is None,
        )
        self._hook_calls = HookDispatch(
            self.hooks,
            self._schedule,
            HookMemory(hooks, own),
            self._position,
            stopping=self._stopping,
            coordinator=self.coordinator,
            compiled=self._compiled,
            replayer=replayer,
            timing=self.timing,
            now=self._clock,
        )
        self._shield = InterruptShield()

    @property
    def state(self) -> TrainState:
        """The state after the newest step. The next step overwrites it: copy what you keep."""
        if self._position.state is None:
            raise RuntimeError(
                f"not entered: use `with {type(self).__name__}(...) as run:` before its first step"
            )
        return self._position.state

    @property
    def steps_taken(self) -> int:
        """The number of the newest step, counted from the start of the training."""
        return self._position.step

    @property
    def stop_reason(self) -> str | None:
        """The reason to stop, once there is one."""
        return self._stopping.reason

    @property
    def interrupted(self) -> bool:
        """True once an interrupt was requested."""
        return self._stopping.interrupted

    def report(self) -> Report:
        """Return the report of the newest step; reading its metrics waits for the device."""
        return self._hook_calls.report()

    def should_stop(self) -> bool:
        """Return whether the newest step was the last one."""
        return self._stopping.finish_if_due(self.steps_taken)

    def request_stop(self, reason: str = "requested") -> None:
        """Stop before the next step or, with other processes, at the next step they agree on.

        The first reason given is kept.
        """
        self._stopping.ask(reason)

    def interrupt(self, reason: str) -> None:
        """Stop soon: at the end hooks save, and skip what takes long."""
        self._stopping.ask(reason, interrupted=True)

    def step(self) -> None:
        """Dispatch one step to the device, without waiting for it."""
        self._guarded(lambda: self._take(1))

    def advance(self) -> None:
        """Dispatch steps, fused if possible, at most up to the next one at which a hook is due."""
        self._guarded(lambda: self._take(self._schedule.next_step - self.steps_taken))
        if not self._fuser.is_decided and self.stop_reason is None and self._fuser.count_step():
            self._guarded(lambda: self._fuser.explore(self._position, self._hook_calls))

    def __enter__(self) -> Self:
        if self._stopping.thread is not None:
            raise RuntimeError(f"this {type(self).__name__} was already entered; create a new one")
        self._stopping.thread = threading.get_ident()
        self._shield.install()
        try:
            with self.timing.measure("starting"):
                self._guarded(self._begin, restart=False)
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
        try:
            if isinstance(error, KeyboardInterrupt) and self._consensus is None:
                self._hook_calls.save_interrupted(error)
            elif error is None:
                self.coordinator.raise_requested_exception()
                self._guarded(self._end, restart=False)
        except BaseException as failure:
            self._close(failure)
            raise
        self._close(error)
        return error is None

    def _guarded(self, take: Callable[[], None], *, restart: bool = True) -> None:
        """Call `take`; after a transient error call it again, after a restart of the run."""
        if restart:
            self._stopping.check()
        while True:
            try:
                return take()
            except FINISHED:
                if not restart:
                    raise
                return self._stopping.end_data(self.steps_taken)
            except Exception as error:
                if self._consensus is not None:
                    cause = self._consensus.group.explain(error)
                    if cause is not error:
                        raise cause from None
                if not self._feed.can_resume or not self._recoveries.allow(error, self.steps_taken):
                    raise
                if restart:
                    self._guarded(functools.partial(self._begin, after=error), restart=False)
                    if self.stop_reason is not None:
                        return None

    def _begin(self, after: Exception | None = None) -> None:
        """Start from the newest checkpoint or the initial state; also `after` an error."""
        position = self._position
        before = position.step
        position.dispatching = None
        if after is not None:
            self._stopping.revoke()
        elif self._record is not None:
            self._record.check(self._compiled, self._hook_calls.notice)
        position.state = self._start_point.state()
        position.step = int(position.state.step)
        position.metrics = StepMetrics(position.step, position.step)
        position.metrics.time = self._clock()
        if after is None:
            self.start_step = position.step
        else:
            self._hook_calls.notice(
                f"after step {before}: {after!s:.200}\nresuming from step {position.step}"
            )
        if (position.step or after is not None) and not isinstance(self._data, Pipeline):
            warnings.warn(
                f"resuming at step {position.step} with data that have no random access: they "
                "continue where they are; a Pipeline would repeat the run exactly",
                stacklevel=2,
            )
        self._hook_calls.begin(is_first=after is None)
        if after is None and self._record is not None:
            self._record.started(position.step, self._hook_calls.notice)
        triggers = [hook.when for hook in self.hooks]
        self._fuser.begin(triggers, position.step)
        if isinstance(self._data, Iterator) and self._fuse == "auto":
            self._fuser.give_up()  # it may wait for steps to be taken, before it has more batches
        if self._batch_hooks and self._fuser.give_up():
            names = ", ".join(type(hook).__name__ for hook in self._batch_hooks)
            self._hook_calls.notice(
                f"steps are not fused: before each of them a hook changes the batch ({names})"
            )
        if self._feed.prepares:
            self._fuser.give_up()
        now = self._clock()
        if self._consensus is not None:
            now = self._consensus.begin(position.step, now)
        self._schedule.start(position.step, now)
        self._feed.start(position.step, triggers, lambda: self._fuser.length)

    def _take(self, limit: float) -> None:
        """Take at most `limit` steps: get their input, dispatch them, call the hooks."""
        step = self.steps_taken
        started = clock()
        state = self.state
        piece = self._feed.take(step, limit, self._fuser.kind, self._fuser.length)
        self.timing.data += clock() - started
        if self._consensus is not None and not self._consensus.agree_to_continue(step):
            self._feed.give_back([piece])
            return self._stopping.hear(step)
        if self._batch_hooks:
            piece = self._feed.change(piece, step, self._batch_hooks, self.report())
        position = self._position
        position.piece = piece
        position.dispatching = step + 1
        if not self._compiled.is_compiled(piece):
            with self.timing.measure("compiling"):
                lowered = self._compiled.lower(state, piece)
                if self._consensus is not None:
                    check_program(self._consensus.group, step + 1, lowered.as_text())
                self._compiled.finish(piece, lowered)
        started = clock()
        with self._shield:
            position.state, position.metrics = self._compiled(state, piece, step + 1)
            position.dispatching = None
            position.step += piece.count
        self.timing.dispatch += clock() - started
        position.metrics.time = now = self._clock()
        if self._consensus is not None:
            now = self._consensus.agree_on_time(position.step, now, self._schedule.next_time)
        due = self._schedule.due(position.step, now)
        self._hook_calls.add(DispatchedCall(position.metrics, piece, due))
        if self._record is not None and not self._record.is_written:
            self._record.write(self.state, piece, self._hook_calls.notice)
        return None

    def _end(self) -> None:
        self._stopping.catch_up(lambda: self.steps_taken, lambda: self._take(1))
        self._feed.finish(self.steps_taken)
        while True:
            try:
                self._hook_calls.settle()
                break
            except FINISHED:  # the run is ending anyway: settle the rest
                continue
        self._hook_calls.end()
        if not self.interrupted:
            chosen = self._hook_calls.final_state(self._agree_on_end)
            self._position.state = self.state if chosen is None else chosen

    def _agree_on_end(self) -> None:
        if self._consensus is not None:
            self._consensus.group.barrier("the hooks of all processes have ended", LIMIT)

    def _close(self, error: BaseException | None) -> None:
        """Close everything. An error in it never hides the error that ended the run."""
        if error is not None and self._consensus is not None:
            # First, because others may wait for this process, and it for them.
            self._consensus.group.fail(error)
        closing: list[Callable[[], None]] = [self._feed.close]
        has_begun = self._position.state is not None
        if has_begun and isinstance(error, Exception) and not isinstance(error, PeerLostError):
            closing.append(functools.partial(self._hook_calls.failed, error))
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
