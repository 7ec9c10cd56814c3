"""Looking back: at what a run started from, and at an earlier step, its batch and the state before it."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ftrain.cluster import Sharding
from ftrain.data import Pipeline
from ftrain.training.hook import Hook
from ftrain.training.objective import Batch
from ftrain.training.program import Program
from ftrain.training.replay import Past, ReplayError, forward
from ftrain.training.scaffold import Scaffold
from ftrain.training.state import Initial, TrainState, place
from ftrain.training.step import Step


class Origin:
    """Where a run starts from, each time that it does: the newest checkpoint, or else the initial state."""

    def __init__(
        self,
        initial: TrainState | Callable[[], TrainState],
        scaffold: Scaffold,
        hooks: Sequence[Hook],
        mesh: Mesh | None,
        sharding: Sharding | None,
    ):
        self._initial, self._scaffold, self._hooks = initial, scaffold, hooks
        self._mesh, self._sharding = mesh, sharding

    def state(self) -> TrainState:
        initial = functools.partial(place, self._initial, self._mesh, self._sharding)
        like = self._initial.like() if isinstance(self._initial, Initial) else None
        state = place(
            self._scaffold.prepare(initial, self._hooks, like), self._mesh, self._sharding
        )
        return (
            state if like is not None else jax.jit(_copy)(state)
        )  # what it was made of stays whole


class Lookback:
    """Makes a `Past` of a step.

    Args:
      take: the step, as it can be called on whole batches.
      is_alone: whether no other processes would have to help in taking steps again.
      changers: hooks that change batches, of which nothing is known afterwards.
    """

    def __init__(
        self,
        take: Step,
        program: Program,
        data: Pipeline | Iterable[Any],
        origin: Origin,
        changers: Sequence[Hook],
        is_alone: bool,
    ):
        self._take, self._program, self._data, self._origin = take, program, data, origin
        self._changers, self._is_alone = changers, is_alone

    def past(
        self, step: int, batch: Callable[[], Batch | None], state: Callable[[], TrainState | None]
    ) -> Past:
        """A step of which `batch` and `state` answer with what is still at hand, if anything is."""
        return Past(
            step,
            take=self._take,
            batch=lambda: self._batch_of(step, batch()),
            start=self._origin.state if self._is_alone else _cannot_be_had,
            state=(lambda: self._state_before(step, state())) if self._is_alone else _cannot_be_had,
            identity=self._data.identity(step - 1) if isinstance(self._data, Pipeline) else {},
        )

    def _batch_of(self, step: int, at_hand: Batch | None) -> Batch:
        if at_hand is not None and self._is_alone:  # of several processes, each has only a part
            return at_hand
        if isinstance(self._data, Pipeline):
            return self._data.batch(step - 1)
        raise ReplayError(f"the batch of step {step} is gone, and the data cannot be asked for it")

    def _state_before(self, step: int, at_hand: TrainState | None) -> TrainState:
        if at_hand is not None and not any(leaf.is_deleted() for leaf in jax.tree.leaves(at_hand)):
            return _copy(at_hand)
        state = self._origin.state()
        if self._changers and int(state.step) < step - 1:
            raise ReplayError("steps cannot be taken again, because hooks change their batches")
        return forward(self._program, state, self._data, step)


def _copy(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)


def _cannot_be_had() -> TrainState:
    raise ReplayError(
        "an earlier state is not computed again where several processes would have to do it together"
    )
