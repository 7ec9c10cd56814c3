"""The loop: a pure step, driven over batches, with hooks around it, and never waiting for the host."""

import functools
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftrain.data import Pipeline, Prefetcher, feed
from ftrain.training.compilation import use_compilation_cache
from ftrain.training.hook import Hook, Report, Value
from ftrain.training.packing import PackedStep, StepMetrics
from ftrain.training.state import TrainState
from ftrain.training.step import Step

IN_FLIGHT = 8  # steps dispatched but not finished; without a bound, virtual devices deadlock and memory grows


class _Dispatched(NamedTuple):
    """A step that the device is at work on, or about to be."""

    step: int
    metrics: StepMetrics
    due: list[Hook]


class Loop:
    """Runs `step` over `data` until a hook, the end of the data or `request_stop` ends it.

        with Loop(step, state, data, hooks=hooks) as loop:
            while not loop.should_stop():
                loop.step()

    Entering starts the hooks, leaving ends them. After an exception `end` is not called; `close` always is. The state
    that is passed in stays usable: the loop works on a copy.
    """

    def __init__(
        self,
        step: Step,
        state: TrainState,
        data: Pipeline | Iterable[Any],
        *,
        hooks: Sequence[Hook] = (),
        mesh: Mesh | None = None,
    ):
        use_compilation_cache()
        self.hooks = list(hooks)
        for hook in self.hooks:
            if not isinstance(hook, Hook):
                raise TypeError(f"hooks must be instances of ftrain.Hook, got {hook!r}")
        self.stop_reason: str | None = None
        self.interrupted = False
        self._data, self._mesh = data, mesh
        self._step = PackedStep(step, mesh)
        self._state = state
        self._metrics = StepMetrics()  # of the newest step
        self.start_step = 0  # the step that this loop went on from
        self._count = 0
        self._batches: Prefetcher | None = None
        self._in_flight: deque[_Dispatched] = deque()
        self._watchers = [hook for hook in self.hooks if type(hook).watch is not Hook.watch]
        self._fired = [0.0] * len(self.hooks)  # when each hook was due last
        self._next_count = self._next_time = 0.0  # the step and the moment at which some hook is due next

    @property
    def state(self) -> TrainState:
        """The state after the newest step. The next step writes over it: copy what you keep."""
        return self._state

    @property
    def steps_taken(self) -> int:
        """The number of the newest step, those before a restart included."""
        return self._count

    def report(self) -> Report:
        """What hooks are told after the newest step; reading its metrics waits for the device."""
        return self._report(self._count, self._metrics, due=[])

    def should_stop(self) -> bool:
        return self.stop_reason is not None

    def request_stop(self, reason: str = "asked to") -> None:
        """End the loop before its next step. The first reason given is kept."""
        self.stop_reason = self.stop_reason or reason

    def interrupt(self, reason: str) -> None:
        """End the loop soon: hooks save what they must at the end, and leave out what takes long."""
        self.interrupted = True
        self.request_stop(reason)

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def step(self) -> None:
        """One step: dispatched to the device, not waited for."""
        if self._batches is None:
            raise RuntimeError(f"enter it before its first step: with {type(self).__name__}(...) as run")
        try:
            batch = next(self._batches)
        except StopIteration:
            self.request_stop("the data ended")
            return
        self._state, self._metrics = self._step(self._state, batch)
        self._count += 1
        due = self._due() if self._count >= self._next_count or time.monotonic() >= self._next_time else []
        self._in_flight.append(_Dispatched(self._count, self._metrics, due))
        self._settle(0 if any(hook.needs_state for hook in due) else IN_FLIGHT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._end()
            except BaseException as failure:
                self._close(failure)
                raise
        self._close(error)

    def _begin(self) -> None:
        state = self._place(self._state)
        for hook in self.hooks:
            state = hook.start(state)
        self._state = state
        self._count = self.start_step = int(state.step)
        self._batches = feed(self._data, self._count)
        if self._count and not isinstance(self._data, Pipeline):
            warnings.warn(
                f"resuming at step {self._count} with data that cannot be asked for a step: it gives its batches from "
                "where it stands; a Pipeline would repeat the run exactly",
                stacklevel=2,
            )
        self._fired = [time.monotonic()] * len(self.hooks)
        self._look_ahead()
        report = self.report()
        for hook in self.hooks:
            hook.begin(report)

    def _end(self) -> None:
        self._settle(0)
        report = self._report(self._count, self._metrics, due=self.hooks)
        _call_all([functools.partial(hook.end, report) for hook in self.hooks])

    def _due(self) -> list[Hook]:
        """The hooks that are due after the newest step."""
        now = time.monotonic()
        due = [i for i, hook in enumerate(self.hooks) if hook.when.due(self._count, now - self._fired[i])]
        for i in due:
            self._fired[i] = now
        self._look_ahead()
        return [self.hooks[i] for i in due]

    def _settle(self, in_flight: int) -> None:
        """Wait until at most `in_flight` steps are unfinished, and tell the hooks of the finished ones, in order."""
        while len(self._in_flight) > in_flight or (self._in_flight and self._in_flight[0].metrics.is_ready()):
            step, metrics, due = self._in_flight.popleft()
            metrics.wait()
            for hook in self._watchers:
                hook.watch(step, metrics)
            if due:
                report = self._report(step, metrics, due)
                for hook in due:
                    hook.after_step(report)

    def _look_ahead(self) -> None:
        """Find out when a hook is due next, so that no step before has to ask."""
        whens = [hook.when for hook in self.hooks]
        self._next_count = min((when.next(self._count) for when in whens), default=math.inf)
        moments = [fired + when.patience for fired, when in zip(self._fired, whens, strict=True)]
        self._next_time = min(moments, default=math.inf)

    def _report(self, step: int, metrics: StepMetrics, due: Sequence[Hook]) -> Report:
        def publish(values: Mapping[str, Value]) -> None:
            for hook in self.hooks:
                if hook not in due:
                    hook.receive(step, values)

        return Report(
            step,
            self._state if not due or any(hook.needs_state for hook in due) else None,
            metrics,
            publish=publish,
            request_stop=self.request_stop,
            interrupted=self.interrupted,
        )

    def _place(self, state: TrainState) -> TrainState:
        """A copy of the state, on the mesh: the step may write over it and the caller's stays whole."""
        if self._mesh is not None and self._mesh.size > 1:
            state = jax.device_put(state, NamedSharding(self._mesh, PartitionSpec()))
        return jax.tree.map(jnp.copy, state)

    def _close(self, error: BaseException | None) -> None:
        """Close the feed and all hooks. What fails in it never hides the error that ended the run."""
        feeds = [] if self._batches is None else [self._batches.close]
        try:
            _call_all([*feeds, *(hook.close for hook in reversed(self.hooks))])
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"closing failed too: {failure!r}")


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Call each of them, whatever the others raise: a failed evaluation must not cost the last checkpoint."""
    failures: list[Exception] = []
    for function in functions:
        try:
            function()
        except Exception as failure:  # noqa: BLE001 - raised below, when all have been called
            failures.append(failure)
    if failures:
        for further in failures[1:]:
            failures[0].add_note(f"then this failed too: {further!r}")
        raise failures[0]
