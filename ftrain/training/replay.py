"""Replay: a step taken again, to see where a value stopped being finite."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.data import Pipeline, feed_pieces
from ftrain.training.metrics import NAN_IF_UNKNOWN
from ftrain.training.objective import Batch
from ftrain.training.program import Program
from ftrain.training.state import TrainState
from ftrain.training.step import Step
from ftrain.tree import Tree, named_leaves

LIMIT = 60.0  # seconds that steps are taken again for


class ReplayError(RuntimeError):
    """Steps that cannot be taken again."""


class Past:
    """An earlier step of a run, to be looked at again. ReplayError where something of it is gone."""

    def __init__(
        self,
        step: int,
        *,
        take: Step,
        batch: Callable[[], Batch],
        start: Callable[[], TrainState],
        state: Callable[[], TrainState],
        identity: Mapping[str, Any],
    ):
        self.step = step
        self.batch = functools.cache(batch)  # what it was given
        self.start = start  # the newest checkpoint, or the beginning
        self.state = state  # the state before it; the steps from `start` on are taken again for it
        self.identity = identity  # what its batch was made of
        self._take = take

    def locate(self) -> list[str]:
        """What was not finite in it, in the order in which a step computes it."""
        batch = self.batch()
        return locate(self._take, self.state(), batch)


def forward(
    program: Program,
    state: TrainState,
    data: Pipeline | Iterable[Any],
    step: int,
    *,
    limit: float = LIMIT,
) -> TrainState:
    """The state before step number `step`, from an earlier one; the steps between are taken again."""
    start = int(state.step)
    if start > step - 1:
        raise ReplayError(f"the earliest state at hand is of step {start}, after step {step - 1}")
    if start < step - 1 and not isinstance(data, Pipeline):
        raise ReplayError(
            f"steps {start + 1} to {step - 1} cannot be taken again: the data cannot be asked for a step"
        )
    if start == step - 1:
        return state
    deadline = time.monotonic() + limit
    stream = feed_pieces(data, start, itertools.repeat(1), program.put)
    try:
        for number in range(start + 1, step):
            state, metrics = program(state, next(stream), number)
            if number % 8 == 0:  # a bounded number of calls in flight
                metrics.wait()
            if time.monotonic() > deadline:
                raise ReplayError(
                    f"taking steps {start + 1} to {step - 1} again takes longer than {limit:g} s"
                )
    finally:
        stream.close()
    return state


def locate(step: Step, state: TrainState, batch: Batch) -> list[str]:
    """What is not finite in a step, in the order in which a step computes it; `state` is the one before it.

    A step made by `make_step` tells its gradients too.
    """
    found = [
        *_not_finite("batch", batch),
        *_not_finite("params", state.params),
        *_not_finite("opt_state", state.opt_state),
        *_not_finite("model_state", state.model_state),
    ]
    differentiate = getattr(step, "differentiate", None)
    if differentiate is not None:
        loss, metrics, _, gradients = jax.jit(differentiate)(state, batch)
        found += [
            *_not_finite("metrics", {"loss": loss, **metrics}),
            *_not_finite("gradients", gradients),
        ]
    after, metrics = jax.jit(step)(state, batch)
    known = NAN_IF_UNKNOWN | ({"loss"} if differentiate is not None else set())
    found += _not_finite(
        "metrics", {name: value for name, value in metrics.items() if name not in known}
    )
    found += _not_finite("params after the step", after.params)
    return list(dict.fromkeys(found))


def _not_finite(what: str, tree: Tree) -> list[str]:
    phrases: list[str] = []
    for name, leaf in named_leaves(tree).items():
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            continue
        values = np.asarray(leaf).astype(np.complex128 if np.iscomplexobj(leaf) else np.float64)
        bad = ~np.isfinite(values)
        if bad.any():
            share = f"{int(bad.sum()):,} of {bad.size:,} values" if bad.ndim else f"{values}"
            where = f", the first at {list(map(int, np.argwhere(bad)[0]))}" if bad.ndim else ""
            phrases.append(
                f"{what}/{name} ({share} not finite{where})"
                if bad.ndim
                else f"{what}/{name} ({share})"
            )
    return phrases
