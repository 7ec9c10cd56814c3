"""Calling hooks: calls in flight are settled in order, and the hooks of a run hear of each of them."""

import copy
import functools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ftrain.coordination import call_all
from ftrain.data import Piece
from ftrain.training.hook import Hook, Host, Report, Value
from ftrain.training.loss import Batch
from ftrain.training.metrics import Metrics
from ftrain.training.replay import PastStep
from ftrain.training.state import TrainState
from ftrain.training.timing import Timing, clock

# Calls dispatched but not finished. Without a bound, virtual devices deadlock and memory grows.
IN_FLIGHT = 8
FUSED_IN_FLIGHT = 2  # of calls that take several steps: one runs, one waits
QUICK = 0.03  # seconds by which hooks may be late, so that several calls are settled together

HookStates = Mapping[str, Mapping[str, Any]]  # by the key of each hook


class Call(NamedTuple):
    """A compiled call that was dispatched to the device."""

    metrics: Metrics
    piece: Piece
    due: list[Hook]  # after its last step


class CallsInFlight:
    """The calls in flight. `settled` is called with each of them, in order, when it is finished.

    Each call is stamped with the time at which it was found finished. Speed is measured between
    those times, because several calls are dispatched at once and then none until one is finished.
    """

    def __init__(self, settled: Callable[[Call], None], timing: Timing, now: Callable[[], float]):
        self._settled = settled
        self._timing = timing
        self._now = now
        self._calls: deque[Call] = deque()
        self._settling: Call | None = None  # the newest call that was waited for
        self.suspect: int | None = None  # the first step of the call that is being waited for

    def add(self, call: Call) -> None:
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
        self.suspect = None

    def batch_of(self, step: int) -> Batch | None:
        """The batch of a step, if its call is still in memory."""
        settling = [] if self._settling is None else [self._settling]
        for call in (*settling, *self._calls):
            if call.metrics.first <= step <= call.metrics.last:
                return call.piece.split()[step - call.metrics.first].batch
        return None

    def _settle(self, limit: int, target: int) -> None:
        """Settle finished calls until at most `limit` are left.

        Go on down to `target` if that is quick: waking up less often costs less.
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
            self.suspect = call.metrics.first
            call.metrics.wait()
            self.suspect = None
            call.metrics.time = self._now()
            self._timing.device += clock() - started
            self._settled(call)


class HookDispatch:
    """Calls the hooks of a run, and passes on what one of them publishes to the others."""

    def __init__(self, host: Host, hooks: Sequence[Hook], timing: Timing):
        self._host = host
        self._hooks = hooks
        self._timing = timing
        self._watchers = [hook for hook in hooks if type(hook).watch is not Hook.watch]
        self._calling: Hook | None = None  # the hook that is being called
        self._last_step = -1  # the newest step at which a hook was due
        self._last_published: dict[str, Value] = {}  # at that step

    def notice(self, text: str) -> None:
        """Pass a message on to the hooks that show it."""
        for hook in self._hooks:
            hook.notice(text)

    def flush(self) -> None:
        """Have all hooks write out what is pending."""
        for hook in self._hooks:
            hook.flush()

    def report(
        self,
        metrics: Metrics,
        state: TrainState | None,
        due: Sequence[Hook] = (),
        examples: int = 0,
    ) -> Report:
        """The report of the last step of `metrics`.

        Hooks that are `due` get the report; the others receive what is published. The state is only
        part of it if one of the due hooks needs it, because the next step overwrites it.
        """
        step = metrics.last

        def publish(values: Mapping[str, Value]) -> None:
            for hook in self._hooks:
                if hook not in due and hook is not self._calling:
                    self.stop_for(hook.receive(step, values))

        has_state = not due or any(hook.needs_state for hook in due)
        return Report(
            self._host,
            step,
            state if has_state else None,
            metrics,
            examples=examples,
            publish=publish,
        )

    def after_call(self, call: Call, state: TrainState | None) -> None:
        """Call the hooks after a call is finished."""
        for hook in self._watchers:
            self._watch(hook, call.metrics)
        if not call.due:
            return
        waiting = list(call.due)
        report = self.report(call.metrics, state, waiting, call.piece.examples)
        for hook in call.due:
            self._calling = waiting.pop(0)
            with self._timing.measure(type(hook).__name__):
                hook.after_step(report)
        self._last_step = report.step
        self._last_published = report.published

    def end(self, metrics: Metrics, state: TrainState | None) -> None:
        """Call `end` of every hook, even if one of them raises an exception."""
        report = self.report(metrics, state)
        if self._last_step == report.step:
            report.published.update(self._last_published)

        def end(hook: Hook) -> None:
            self._calling = hook
            with self._timing.measure(type(hook).__name__):
                hook.end(report)

        call_all([functools.partial(end, hook) for hook in self._hooks])

    def save(self, report: Report) -> None:
        """Have the hooks that save the state do so now."""
        for hook in self._hooks:
            if hook.saves_state:
                with self._timing.measure(type(hook).__name__):
                    hook.after_step(report)

    def failed(self, error: Exception, past: PastStep | None) -> None:
        """Call `failed` of every hook, even if one of them raises an exception."""
        call_all([functools.partial(hook.failed, error, past) for hook in self._hooks])

    def stop_for(self, reason: str | None) -> None:
        """Stop for the reason that a hook returned, if it returned one and the run is not ending."""
        if reason is not None and not self._host.ending:
            self.notice(f"stopping: {reason}")
            self._host.request_stop(reason)

    def _watch(self, hook: Hook, metrics: Metrics) -> None:
        started = clock()
        reason = hook.watch(metrics)
        self._timing.add(type(hook).__name__, clock() - started)
        self.stop_for(reason)


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
        """The states of all hooks that have one."""
        states = {key: _checked(key, hook.state()) for key, hook in self._hooks.items()}
        return {key: state for key, state in states.items() if state is not None}

    def begin(self) -> list[str]:
        """Find the states saved with the state of the run; return the keys that no hook has."""
        found = (hook.saved_hook_states() for hook in self._hooks.values())
        saved = next((states for states in found if states is not None), {})
        self._saved = {**(self._first or {}), **saved}
        return [key for key in saved if key not in self._known]

    def restore(self, hook: Hook) -> str | None:
        """Restore the state of a hook; return its reason to stop, if it has one.

        A hook without a saved state keeps the one it has, and gets it back if the run recovers.
        """
        key = next((key for key, own in self._hooks.items() if own is hook), None)
        return None if key is None or key not in self._saved else hook.restore(self._saved[key])

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
