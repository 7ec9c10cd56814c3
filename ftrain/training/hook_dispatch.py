"""Calling hooks: calls in flight are settled in order, and hooks are called after each of them."""

import copy
import dataclasses
import functools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ftrain.coordination import Coordinator, call_all
from ftrain.training.compiled_step import CompiledStep
from ftrain.training.hook import Hook, Listener, Report, StateSaver, Value
from ftrain.training.loss import Batch
from ftrain.training.pieces import Piece
from ftrain.training.replay import PastStep, Replayer
from ftrain.training.state import TrainState
from ftrain.training.step_metrics import StepMetrics, Timing, clock
from ftrain.training.stopping import Stopping
from ftrain.training.trigger import HookSchedule

# Calls dispatched but not finished. Without a bound, virtual devices deadlock and memory grows.
IN_FLIGHT = 8
FUSED_IN_FLIGHT = 2  # of calls that take several steps: one runs, one waits
QUICK = 0.03  # seconds by which hooks may be late, so that several calls are settled together

HookStates = Mapping[str, Mapping[str, Any]]  # by the key of each hook


@dataclasses.dataclass
class Position:
    """Where a run is: the newest step that was dispatched, and what came out of it."""

    step: int = 0
    state: TrainState | None = None
    metrics: StepMetrics = dataclasses.field(default_factory=lambda: StepMetrics(0, 0))
    piece: Piece | None = None  # the input of the newest call
    dispatching: int | None = None  # the first step of a call that is being dispatched


class DispatchedCall(NamedTuple):
    """A compiled call that was dispatched to the device."""

    metrics: StepMetrics
    piece: Piece
    due: list[Hook]  # after its last step


class HookDispatch:
    """Waits for the calls in flight, in order, and calls the hooks after each of them.

    Each call is stamped with the time at which it was found finished. Speed is measured between
    those times, because several calls are dispatched at once and then none until one is finished.
    """

    def __init__(
        self,
        hooks: Sequence[Hook],
        schedule: HookSchedule[Hook],
        memory: "HookMemory",
        position: Position,
        *,
        stopping: Stopping,
        coordinator: Coordinator,
        compiled: CompiledStep,
        replayer: Replayer,
        timing: Timing,
        now: Callable[[], float],
    ):
        self.stopping = stopping
        self.coordinator = coordinator
        self.ending = False
        self.flops = compiled.flops
        self.hook_states = memory.collect
        self._hooks = hooks
        self._schedule = schedule
        self._memory = memory
        self._position = position
        self._replayer = replayer
        self.timing = timing
        self._now = now
        self._ended: set[int] = set()  # the ids of hooks that have ended
        self._calls: deque[DispatchedCall] = deque()
        self._settling: DispatchedCall | None = None  # the newest call that was waited for
        self._waiting_for: int | None = None  # the first step of the call that is being waited for
        self._listeners: dict[str, list[tuple[Hook, Listener]]] = {}
        self._early_notices: list[str] | None = []  # those shown before all hooks have begun
        self._calling: Hook | None = None  # the hook that is being called
        self._last_step = -1  # the newest step at which a hook was due
        self._last_published: dict[str, Value] = {}  # at that step

    def begin(self, *, is_first: bool) -> None:
        """Call `begin` of the hooks, and restore their states; forget what was before."""
        self.clear()
        self._listeners = {}
        self._early_notices = self._early_notices or []
        report = self.report()
        unknown = self._memory.begin()
        if unknown and is_first:
            self.notice(
                "the checkpoint has the state of hooks that this run does not have: "
                f"{', '.join(unknown)}"
            )
        try:
            for hook in self._hooks:
                self._calling = hook
                hook.begin(report)
                self._memory.restore(hook)
        finally:
            self._calling = None
            early, self._early_notices = self._early_notices, None
            for text in early:
                self.notice(text)
        self._memory.started()

    def add(self, call: DispatchedCall) -> None:
        """Add a dispatched call, and wait until there is room for another.

        If a hook that is due needs the state, wait for all calls: the next one overwrites it.
        """
        self._calls.append(call)
        if any(hook.needs_state for hook in call.due):
            self.settle()
            return
        limit = IN_FLIGHT if call.piece.count == 1 else FUSED_IN_FLIGHT
        self._settle(limit, target=limit // 2 if len(self._calls) > limit else limit)

    def settle(self) -> None:
        """Wait until all calls are finished and their hooks were called."""
        self._settle(0, target=0)

    def clear(self) -> None:
        """Forget all calls: the run restarts from a checkpoint."""
        self._calls.clear()
        self._settling = None
        self._waiting_for = None

    def end(self) -> None:
        """Call `end` of every hook, even if one of them raises an exception.

        After a transient error this is called again, for the hooks that did not end.
        """
        self.ending = True
        report = self.report()
        if self._last_step == report.step:
            report.published.update(self._last_published)

        def end(hook: Hook) -> None:
            self._calling = hook
            with self.timing.measure(type(hook).__name__):
                hook.end(report)
            self._ended.add(id(hook))

        waiting = [hook for hook in self._hooks if id(hook) not in self._ended]
        call_all([functools.partial(end, hook) for hook in waiting])

    def final_state(self, agree: Callable[[], None]) -> TrainState | None:
        """The state that a hook ends the run with; None to keep that of the last step.

        `agree` waits for the other processes: all of them must see the same checkpoints.
        """
        savers = [hook for hook in self._hooks if isinstance(hook, StateSaver)]
        chosen = [saver for saver in savers if saver.replaces_final_state]
        if not chosen:
            return None
        agree()
        report = self.report()
        states = (saver.final_state(report) for saver in chosen)
        return next((state for state in states if state is not None), None)

    def save_interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """After Ctrl-C: save the newest state, and add a note to `interrupt` about it."""
        position = self._position
        if position.state is None:
            return
        after = f"the state after step {position.step}"
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(position.state)):
            interrupt.add_note(
                f"{after} is lost: the interrupt came while a step was writing over it; "
                "the newest checkpoint, if there is one, is as it was"
            )
            return
        savers = [hook for hook in self._hooks if isinstance(hook, StateSaver)]
        if not any(not saver.read_only for saver in savers):
            interrupt.add_note(f"{after} is not saved, as no hook saves; `state` has it")
            return
        self.stopping.ask("KeyboardInterrupt", interrupted=True)
        try:
            step = int(position.state.step)
            if step != position.metrics.last:  # the run was going back to an earlier step
                position.step = step
                position.metrics = StepMetrics(step, step)
                self.clear()
            self.settle()
            report = self._report(position.metrics, position.state, self._hooks)
            call_all([functools.partial(saver.end, report) for saver in savers])
        except Exception as failure:  # noqa: BLE001 - the interrupt is raised
            interrupt.add_note(f"{after} could not be saved: {failure!r}")
        else:
            interrupt.add_note(f"the state after step {position.step} is saved")

    def failed(self, error: Exception) -> None:
        """Call the hooks that listen for failures, even if one of them raises an exception."""
        step = getattr(error, "step", None)
        if not isinstance(step, int):  # the error does not name its step
            step = self._position.dispatching or self._waiting_for
        past = None if step is None else self.past(step)
        call_all([functools.partial(call, error, past) for _, call in self._listening("failure")])

    def listen(self, **listeners: Listener | None) -> None:
        """Add functions of the hook that is being called."""
        if self._calling is None:
            raise RuntimeError("report.listen must be called in `begin` of a hook")
        for event, listener in listeners.items():
            if listener is not None:
                self._listeners.setdefault(event, []).append((self._calling, listener))

    def notice(self, text: str) -> None:
        """Show a message to the user, through the hooks that write a log."""
        if self._early_notices is not None:
            self._early_notices.append(text)
            return
        for _, show in self._listening("notice"):
            show(text)

    def flush(self) -> None:
        """Have all hooks finish their pending writes."""
        for _, flush in self._listening("flush"):
            flush()

    def save(self, report: Report) -> None:
        """Have the hooks that save the state do so now."""
        for hook in self._hooks:
            if isinstance(hook, StateSaver):
                with self.timing.measure(type(hook).__name__):
                    hook.after_step(report)

    def past(self, step: int) -> PastStep:
        """Return an earlier step, to be inspected or taken again."""
        position = self._position
        return self._replayer.past(
            step,
            batch=functools.partial(self._batch_in_memory, step),
            state=lambda: position.state if step == position.step + 1 else None,
        )

    def report(self) -> Report:
        """Return the report of the newest step; reading its metrics waits for the device."""
        return self._report(self._position.metrics, self._position.state)

    def _report(
        self,
        metrics: StepMetrics,
        state: TrainState | None,
        due: Sequence[Hook] = (),
        examples: int = 0,
    ) -> Report:
        """Return the report of the last step of `metrics`.

        Hooks that are `due` get the report; others that listen get what is published. The state is
        only part of it if a due hook needs it, because the next step overwrites it.
        """
        step = metrics.last

        def publish(values: Mapping[str, Value]) -> None:
            for hook, receive in self._listening("published"):
                if hook not in due and hook is not self._calling:
                    receive(step, values)

        has_state = not due or any(hook.needs_state for hook in due)
        return Report(
            self, step, state if has_state else None, metrics, examples=examples, publish=publish
        )

    def _settle(self, limit: int, target: int) -> None:
        """Settle finished calls until at most `limit` are left.

        Continue down to `target` if that is quick: waking up less often costs less.
        """
        entered = clock()
        while self._calls and (
            len(self._calls) > limit
            or self._calls[0].metrics.is_ready()
            or (len(self._calls) > target and clock() - entered < QUICK)
        ):
            call = self._calls.popleft()
            self._settling = call
            started = clock()
            self._waiting_for = call.metrics.first
            call.metrics.wait()
            self._waiting_for = None
            call.metrics.time = self._now()
            self.timing.device += clock() - started
            self._call_hooks(call)

    def _call_hooks(self, call: DispatchedCall) -> None:
        for hook, listener in self._listening("metrics"):
            started = clock()
            listener(call.metrics)
            self.timing.add(type(hook).__name__, clock() - started)
        if not call.due:
            return
        # The report keeps this list: hooks that are still to be called read what is published from
        # the report; those that were called receive it by `listen(published=...)`.
        uncalled = list(call.due)
        report = self._report(call.metrics, self._position.state, uncalled, call.piece.examples)
        for hook in call.due:
            self._calling = uncalled.pop(0)
            with self.timing.measure(type(hook).__name__):
                hook.after_step(report)
        self._calling = None
        self._last_step = report.step
        self._last_published = report.published
        self._schedule.look_ahead(self._position.step)  # hooks may have changed their triggers

    def _listening(self, event: str) -> Sequence[tuple[Hook, Listener]]:
        return self._listeners.get(event, ())

    def _batch_in_memory(self, step: int) -> Batch | None:
        if step == self._position.dispatching and self._position.piece is not None:
            return self._position.piece.split()[0].batch
        settling = [] if self._settling is None else [self._settling]
        for call in (*settling, *self._calls):
            if call.metrics.first <= step <= call.metrics.last:
                return call.piece.split()[step - call.metrics.first].batch
        return None


class HookMemory:
    """Collects the states of hooks for a checkpoint, and restores them.

    The key of a hook is its class and label; hooks that share both are numbered:
    "StopWhen(loss, min)", "Counting", "Counting#2".

    Args:
      hooks: those of all processes, so that keys are the same in each of them.
      present: those that this process has.
    """

    def __init__(self, hooks: Sequence[Hook], present: Sequence[Hook]):
        self._known = _keys(hooks)
        own = {id(hook) for hook in present}
        self._hooks = {
            key: hook for key, hook in zip(self._known, hooks, strict=True) if id(hook) in own
        }
        self._first: HookStates | None = None  # the states at the start of the run
        self._saved: HookStates = {}

    def collect(self) -> dict[str, Mapping[str, Any]]:
        """Return the states of all hooks that have one."""
        states = {key: _checked(key, hook.state()) for key, hook in self._hooks.items()}
        return {key: state for key, state in states.items() if state is not None}

    def begin(self) -> list[str]:
        """Find the states saved with the state of the run; return the keys that no hook has."""
        savers = [hook for hook in self._hooks.values() if isinstance(hook, StateSaver)]
        found = (saver.saved_hook_states() for saver in savers)
        saved = next((states for states in found if states is not None), {})
        self._saved = {**(self._first or {}), **saved}
        return [key for key in saved if key not in self._known]

    def restore(self, hook: Hook) -> None:
        """Restore the state of a hook, if one was saved.

        A hook without a saved state keeps the one it has, and gets it back if the run recovers.
        """
        key = next((key for key, own in self._hooks.items() if own is hook), None)
        if key is not None and key in self._saved:
            hook.restore(self._saved[key])

    def started(self) -> None:
        """All hooks have begun."""
        if self._first is None:
            self._first = copy.deepcopy(self.collect())


def _keys(hooks: Sequence[Hook]) -> list[str]:
    seen: Counter[str] = Counter()
    keys: list[str] = []
    for hook in hooks:
        name = f"{type(hook).__name__}({hook.label})" if hook.label else type(hook).__name__
        seen[name] += 1
        keys.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return keys


def _checked(key: str, state: Any) -> Mapping[str, Any] | None:
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"{key}: state() must return a mapping or None, got {state!r:.60}")
    return state
