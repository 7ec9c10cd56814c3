"""Where a run starts and how it recovers: scaffold, starting point, transient errors."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ftrain.cluster import Sharding
from ftrain.training.hook import Hook, StateSaver
from ftrain.training.state import Initial, TrainState, place

RETRIED = ("ABORTED", "UNAVAILABLE")  # codes of transient errors


class NotReadyError(RuntimeError):
    """A state that a run cannot start from."""


@dataclass(frozen=True)
class Scaffold:
    """How the state of a run is prepared: restored or else initialised, then checked.

    All of it is repeated when a run recovers. `init_fn(state)` is called if no hook restored a
    checkpoint, then always `local_init_fn(state)`; both return a state. `ready_fn(state)` returns
    None, or a string with the reason why the state is not ready.

    With `wait_secs` nothing is initialised: a process that is not the chief waits up to that many
    seconds for the chief's first checkpoint, which the hooks restore. It saves nothing either,
    because the checkpoints are the chief's; reading them needs no lock.
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
        """Return the state to start from.

        `initial` makes the state before the first step. It is not called if a checkpoint is
        restored and `like` has the shapes of the state.
        """
        savers = [hook for hook in hooks if isinstance(hook, StateSaver)]
        for saver in savers:
            saver.read_only = self.wait_secs is not None
        state = self._start(initial, savers, like)
        if self.local_init_fn is not None:
            state = self.local_init_fn(state)
        reason = None if self.ready_fn is None else self.ready_fn(state)
        if reason is not None:
            raise NotReadyError(f"the state of step {int(state.step)} is not ready: {reason}")
        return state

    def _start(
        self,
        initial: Callable[[], TrainState],
        savers: Sequence[StateSaver],
        like: TrainState | None,
    ) -> TrainState:
        deadline = time.monotonic() + (self.wait_secs or 0.0)
        first = initial() if like is None else None
        while True:
            restored = _restore(savers, like if first is None else first)
            if restored is not None:
                return restored
            if first is None:
                first = initial()
            if self.wait_secs is None:
                return first if self.init_fn is None else self.init_fn(first)
            if time.monotonic() >= deadline:
                raise NotReadyError(
                    f"no checkpoint to start from appeared within {self.wait_secs:g} s; "
                    "is the chief running?"
                )
            time.sleep(min(self.poll_secs, max(0.0, deadline - time.monotonic())))


def _restore(savers: Sequence[StateSaver], like: TrainState | None) -> TrainState | None:
    found = (saver.restore_state(like) for saver in savers if like is not None)
    return next((state for state in found if state is not None), None)


class StartPoint:
    """Where a run starts and recovers: the newest checkpoint or the initial state."""

    def __init__(
        self,
        initial: TrainState | Callable[[], TrainState],
        scaffold: Scaffold,
        hooks: Sequence[Hook],
        mesh: Mesh | None,
        sharding: Sharding | None,
    ):
        self._initial = initial
        self._scaffold = scaffold
        self._hooks = hooks
        self._mesh = mesh
        self._sharding = sharding

    def state(self) -> TrainState:
        """Return a new copy of the state to start from."""
        initial = functools.partial(place, self._initial, self._mesh, self._sharding)
        shapes = self._initial.like if isinstance(self._initial, Initial) else None
        like = None if shapes is None else shapes()
        prepared = self._scaffold.prepare(initial, self._hooks, like)
        state = place(prepared, self._mesh, self._sharding)
        if like is not None:
            return state
        return jax.jit(_copy)(state)  # the user's own arrays are not overwritten


def _copy(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)


def can_be_retried(error: BaseException) -> bool:
    """Return whether this is a transient runtime error.

    >>> can_be_retried(jax.errors.JaxRuntimeError("UNAVAILABLE: connection lost"))
    True
    """
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith(RETRIED)


def check_recoveries(most: int) -> None:
    """Raise ValueError unless `most` is a number of recoveries."""
    if not isinstance(most, int) or most < 0:
        raise ValueError(f"recoveries must be a whole number >= 0, got {most!r}")


class Recoveries:
    """Limits the recoveries of a run; the count restarts whenever the run gets further."""

    def __init__(self, most: int):
        check_recoveries(most)
        self._most = most
        self._left = most
        self._furthest = -1

    def allow(self, error: BaseException, step: int) -> bool:
        """Return whether to recover from `error`, which was raised after `step`."""
        if not can_be_retried(error):
            return False
        if step > self._furthest:
            self._furthest = step
            self._left = self._most
        self._left -= 1
        if self._left < 0 and self._most:
            error.add_note(f"{self._most} recoveries did not get beyond step {self._furthest}")
        return self._left >= 0
