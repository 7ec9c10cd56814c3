"""The scaffold: how a run comes by the state that it starts from."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftrain.training.hook import Hook
from ftrain.training.state import TrainState


class NotReadyError(RuntimeError):
    """A state that is not fit to start from."""


@dataclass(frozen=True)
class Scaffold:
    """What is done to a state before a run starts with it: restored, or else initialised, then made ready.

    All of it is done again when a run recovers. `init_fn(state)` is called if no hook has restored a checkpoint,
    `local_init_fn(state)` always, after it; both answer with a state. `ready_fn(state)` then answers with a text that
    says why the state is not ready, or with None.

    With `wait_secs` nothing is initialised here: a process that is not the chief waits so long for the chief's first
    checkpoint, which the hooks restore. Nothing is saved here either: the checkpoints are the chief's, who may be
    running, and whose lock is not needed to read them.
    """

    init_fn: Callable[[TrainState], TrainState] | None = None
    local_init_fn: Callable[[TrainState], TrainState] | None = None
    ready_fn: Callable[[TrainState], str | None] | None = None
    wait_secs: float | None = None
    poll_secs: float = 0.5

    def prepare(
        self,
        initial: Callable[[], TrainState],
        hooks: Sequence[Hook],
        like: TrainState | None = None,
    ) -> TrainState:
        """The state to start from; `initial` makes the one before the first step, which is not needed to restore one
        if `like` tells its shapes."""
        for hook in hooks:
            hook.follows_chief = self.wait_secs is not None
        state = self._start(initial, hooks, like)
        if self.local_init_fn is not None:
            state = self.local_init_fn(state)
        reason = None if self.ready_fn is None else self.ready_fn(state)
        if reason is not None:
            raise NotReadyError(f"the state of step {int(state.step)} is not ready: {reason}")
        return state

    def _start(
        self, initial: Callable[[], TrainState], hooks: Sequence[Hook], like: TrainState | None
    ) -> TrainState:
        deadline = time.monotonic() + (self.wait_secs or 0.0)
        first = initial() if like is None else None
        while True:
            restored = _restore(hooks, like if first is None else first)
            if restored is None and first is None:
                first = initial()
            state = restored or first
            assert state is not None
            started = functools.reduce(lambda state, hook: hook.start(state), hooks, state)
            if restored is not None or started is not state:
                return started
            if self.wait_secs is None:
                return state if self.init_fn is None else self.init_fn(state)
            if time.monotonic() >= deadline:
                raise NotReadyError(
                    f"no checkpoint to start from appeared within {self.wait_secs:g} s; is the chief running?"
                )
            time.sleep(min(self.poll_secs, max(0.0, deadline - time.monotonic())))


def _restore(hooks: Sequence[Hook], like: TrainState | None) -> TrainState | None:
    found = (hook.restore_state(like) for hook in hooks if like is not None)
    return next((state for state in found if state is not None), None)
