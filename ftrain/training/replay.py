"""Replay: take an earlier step again, and find where a value stopped being finite."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core.primitives import jit_p

from ftrain.data import Pipeline
from ftrain.jaxpr import apply_equation, interpret
from ftrain.training.compiled_step import CompiledStep
from ftrain.training.loss import Batch
from ftrain.training.pieces import prefetch_pieces
from ftrain.training.state import TrainState
from ftrain.training.step import Step, TrainStep
from ftrain.training.step_metrics import NAN_IF_UNKNOWN
from ftrain.tree import Tree, named_leaves

LIMIT = 60.0  # seconds for taking steps again
_OURS = Path(__file__).parents[1]
_THEIRS = Path(jax.__file__).parents[1]  # where libraries are installed


class ReplayError(RuntimeError):
    """A step that cannot be taken again."""


class PastStep:
    """An earlier step of a run. Its methods raise ReplayError if its batch or state is lost."""

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
        self.batch = functools.cache(batch)
        self.start = start  # the newest checkpoint, or the initial state
        self.state = state  # the state before it: the steps from `start` on are taken again
        self.identity = identity  # what its batch consists of
        self._take = take

    def locate(self) -> list[str]:
        """Return the names of non-finite values, in the order in which the step computes them."""
        batch = self.batch()
        return locate(self._take, self.state(), batch)


class Replayer:
    """Makes the `PastStep` of a step of this run.

    Args:
      take: the step, as a function of a state and a whole batch.
      start: returns the state that the run started from, or its newest checkpoint.
      batches_change: whether hooks change batches, so that the steps cannot be taken again.
      is_alone: whether this is the only process; steps are not taken again by several.
    """

    def __init__(
        self,
        take: Step,
        compiled: CompiledStep,
        data: Pipeline | Iterable[Any],
        start: Callable[[], TrainState],
        *,
        batches_change: bool,
        is_alone: bool,
    ):
        self._take = take
        self._compiled = compiled
        self._data = data
        self._start = start
        self._batches_change = batches_change
        self._is_alone = is_alone

    def past(
        self, step: int, batch: Callable[[], Batch | None], state: Callable[[], TrainState | None]
    ) -> PastStep:
        """Return a step; `batch` and `state` return what is still in memory, or None."""
        return PastStep(
            step,
            take=self._take,
            batch=lambda: self._batch_of(step, batch()),
            start=self._start if self._is_alone else _not_with_several_processes,
            state=(lambda: self._state_before(step, state()))
            if self._is_alone
            else _not_with_several_processes,
            identity=self._data.identity(step - 1) if isinstance(self._data, Pipeline) else {},
        )

    def _batch_of(self, step: int, in_memory: Batch | None) -> Batch:
        if in_memory is not None and self._is_alone:  # of several processes, each has only a part
            return in_memory
        if isinstance(self._data, Pipeline):
            return self._data.batch(step - 1)
        raise ReplayError(f"the batch of step {step} is lost, and the data have no random access")

    def _state_before(self, step: int, in_memory: TrainState | None) -> TrainState:
        is_whole = in_memory is not None and not any(
            leaf.is_deleted() for leaf in jax.tree.leaves(in_memory)
        )
        if in_memory is not None and is_whole:
            return jax.tree.map(jnp.copy, in_memory)
        state = self._start()
        if self._batches_change and int(state.step) < step - 1:
            raise ReplayError("steps cannot be taken again, because hooks change their batches")
        return forward(self._compiled, state, self._data, step)


def _not_with_several_processes() -> TrainState:
    raise ReplayError("several processes cannot take earlier steps again")


def forward(
    compiled: CompiledStep,
    state: TrainState,
    data: Pipeline | Iterable[Any],
    step: int,
    *,
    limit: float = LIMIT,
) -> TrainState:
    """Return the state before `step`, computed from an earlier one by taking the steps again."""
    start = int(state.step)
    if start > step - 1:
        raise ReplayError(f"the earliest state available is of step {start}, after step {step - 1}")
    if start < step - 1 and not isinstance(data, Pipeline):
        raise ReplayError(
            f"steps {start + 1} to {step - 1} cannot be taken again: the data have no random access"
        )
    if start == step - 1:
        return state
    deadline = time.monotonic() + limit
    stream = prefetch_pieces(data, start, itertools.repeat(1), compiled.put)
    try:
        for number in range(start + 1, step):
            state, metrics = compiled(state, next(stream), number)
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
    """Return the names of non-finite values of a step, in the order in which it computes them.

    `state` is the state before the step. Gradients are included for a step made by `make_step`.
    """
    found = [
        *_nonfinite("batch", batch),
        *_nonfinite("params", state.params),
        *_nonfinite("opt_state", state.opt_state),
        *_nonfinite("model_state", state.model_state),
    ]
    if isinstance(step, TrainStep):
        loss, metrics, _, gradients = jax.jit(step.differentiate)(state, batch)
        found += [
            *_nonfinite("metrics", {"loss": loss, **metrics}),
            *_nonfinite("gradients", gradients),
        ]
    after, metrics = jax.jit(step)(state, batch)
    known = NAN_IF_UNKNOWN | ({"loss"} if isinstance(step, TrainStep) else set())
    found += _nonfinite(
        "metrics", {name: value for name, value in metrics.items() if name not in known}
    )
    found += _nonfinite("params after the step", after.params)
    return list(dict.fromkeys(found))


def _nonfinite(what: str, tree: Tree) -> list[str]:
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
                f"{what}/{name} ({share} non-finite{where})"
                if bad.ndim
                else f"{what}/{name} ({share})"
            )
    return phrases


def find_nan_origin(step: Step, state: TrainState, batch: Batch) -> list[str]:
    """Describe the first operations of a step that return infinity and NaN for finite inputs.

    Each description names the source line. An infinity may be intended, as in a mask. A loop or a
    branch counts as one operation. Slow: every operation is computed by itself.
    """
    found: dict[str, str] = {}

    def evaluate(equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
        if equation.primitive is jit_p:
            called: ClosedJaxpr = equation.params["jaxpr"]
            return interpret(called.jaxpr, called.consts, inputs, evaluate)
        outputs = apply_equation(equation, inputs)
        for what, test in (("infinity", jnp.isinf), ("NaN", jnp.isnan)):
            if what not in found and _any(test, outputs) and not _any(test, inputs):
                found[what] = _describe(equation, what, inputs)
        if "NaN" in found:
            raise _NanFound
        return outputs

    traced: ClosedJaxpr = jax.make_jaxpr(step)(state, batch)
    with contextlib.suppress(_NanFound):
        interpret(traced.jaxpr, traced.consts, jax.tree.leaves((state, batch)), evaluate)
    return list(found.values())


class _NanFound(Exception):  # noqa: N818 - ends the search
    """The origin of a NaN is known: the remaining operations need not be computed."""


def _any(test: Any, values: Sequence[Any]) -> bool:
    numbers = [value for value in values if jnp.issubdtype(jnp.result_type(value), jnp.inexact)]
    return any(bool(test(value).any()) for value in numbers)


def _describe(equation: JaxprEqn, what: str, inputs: Sequence[Any]) -> str:
    of = ", ".join(f"{jnp.result_type(value)}{list(jnp.shape(value))}" for value in inputs)
    return f"the first {what} comes out of {equation.primitive.name}({of}){_line_of(equation)}"


def _line_of(equation: JaxprEqn) -> str:
    """Return the line of the user's code that an operation comes from, or else the nearest one."""
    trace = equation.source_info.traceback
    frames = [] if trace is None else list(trace.frames)
    outside = [frame for frame in frames if not _is_library(frame.file_name)]
    if not outside:
        return ""
    frame = outside[0]
    return f"\n  in {frame.file_name}, line {frame.line_num}, in {frame.function_name}"


def _is_library(file: str) -> bool:
    path = Path(file)
    if path.is_relative_to(_OURS):
        return not path.is_relative_to(_OURS / "tasks")
    return path.is_relative_to(_THEIRS) or not path.exists()
