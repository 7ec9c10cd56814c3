"""Fusing: how many steps one compiled call takes."""

import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.coordination import Coordinator
from ftrain.data import Piece, stack
from ftrain.training.objective import Batch
from ftrain.training.program import Program
from ftrain.training.state import TrainState
from ftrain.training.timing import Timing
from ftrain.training.trigger import Trigger
from ftrain.tree import count_bytes, named_leaves

Fuse = int | Literal["auto"]

AUTO_STEPS = 50  # more gain nothing that can be measured
AUTO_BYTES = 64 << 20  # of the batches of one call
STATE_BYTES = 256 << 20  # of a state that a trial copies
LONG_STEP = 1e-3  # seconds; the time to dispatch a step of a few leaves is a tenth of it
DISPATCH_SHARE = 0.25  # of a long step's time; above it fusing is tried all the same
WARM_UP = 3  # steps that are not measured
MEASURED = 8  # steps that are
LEAST_GAIN = 0.95  # the share of the time that is fast enough to fuse


def gaps(triggers: Sequence[Trigger], start: int) -> Iterator[float]:
    """The steps from one at which some hook is due by count to the next, infinity after the last."""
    step, fired = start, [trigger.counts_from(start) for trigger in triggers]
    while True:
        upcoming = [trigger.next(step, last) for trigger, last in zip(triggers, fired, strict=True)]
        due = min(upcoming, default=math.inf)
        yield due - step
        if due == math.inf:
            return
        step = int(due)
        fired = [step if moment == due else last for moment, last in zip(upcoming, fired, strict=True)]


def best_length(triggers: Sequence[Trigger], start: int, most: int) -> int:
    """The number of steps, at most `most`, with which the fewest calls reach every step at which a hook is due.

    >>> from ftrain.training import every
    >>> best_length([every(steps=100), every(steps=500)], 0, 32)
    25
    """
    ahead = [gap for gap, _ in zip(gaps(triggers, start), range(64), strict=False)]
    finite = [int(gap) for gap in ahead if gap != math.inf] or [most]
    return min(range(1, most + 1), key=lambda length: sum(gap // length + gap % length for gap in finite))


class Fuser:
    """Decides how many steps a fused call takes: so many at most, or, with "auto", what a trial finds to be best."""

    def __init__(self, fuse: Fuse, program: Program, coordinator: Coordinator):
        if fuse != "auto" and (not isinstance(fuse, int) or fuse < 1):
            raise ValueError(f'fuse must be "auto" or a whole number >= 1, got {fuse!r}')
        self.length = 1
        self.trial: Trial | None = None
        self._fuse: Fuse = fuse
        self._program, self._coordinator = program, coordinator
        self._decided = False

    def begin(self, triggers: Sequence[Trigger], start: int) -> None:
        """A run begins, or begins anew, whose hooks have these triggers."""
        if self._decided:
            return
        if self._fuse != "auto":
            self.length, self._decided = best_length(triggers, start, self._fuse), True
            return
        length = best_length(triggers, start, AUTO_STEPS)
        self.trial = Trial(self._program, length, self._coordinator) if length > 1 else None

    def give_up(self) -> bool:
        """Take one step a call for good; whether that changes anything."""
        changes = self._fuse != 1 and not (self._decided and self.length == 1)
        self.length, self.trial, self._decided = 1, None, True
        return changes

    def measure(self, timing: Timing, state: TrainState, piece: Piece) -> None:
        """All steps so far are finished: go on with the trial, if there is hope."""
        if self.trial is not None and not self.trial.measure(timing.dispatch, timing.device, state, piece):
            self.give_up()

    def judge(self, fused: tuple[TrainState, float] | None, state: TrainState, seconds: float) -> str:
        """Decide: the trial's steps led to the state and took the seconds in `fused`, single ones these."""
        length = 1 if self.trial is None else self.trial.length
        self.give_up()
        if fused is None:
            return ""
        leaf = first_difference(state, fused[0])
        if leaf is not None:
            return f"steps are not fused: fused ones give other bits, in leaf {leaf} first"
        if fused[1] > LEAST_GAIN * seconds:
            return ""
        self.length = length
        return f"{length} steps are fused into one call, in {fused[1] / seconds:.0%} of the time"


class Trial:
    """Finds out, while a run goes on in single steps, whether fused ones are as exact, and faster.

    First some single steps are measured: long ones that are quickly dispatched gain nothing. Then a thread compiles the
    fused call. At last some steps are taken both ways, and their states compared bit by bit, and their times.
    """

    def __init__(self, program: Program, length: int, coordinator: Coordinator):
        self.length = length
        self._program, self._coordinator = program, coordinator
        self._steps = 0
        self._mark = (0.0, 0.0)
        self._compiled = threading.Event()

    def is_mark(self) -> bool:
        """Called after every single step: whether all steps should be finished now, and `measure` called."""
        self._steps += 1
        return self._steps in (WARM_UP, WARM_UP + MEASURED)

    def measure(self, dispatch: float, device: float, state: TrainState, piece: Piece) -> bool:
        """Take the seconds that dispatching, and waiting for the device, took so far; False if fusing is hopeless."""
        if self._steps == WARM_UP:
            self._mark = dispatch, device
            self.length = min(self.length, max(1, AUTO_BYTES // max(1, count_bytes(piece.batch))))
            return self.length > 1 and count_bytes(state) <= STATE_BYTES
        dispatch, device = dispatch - self._mark[0], device - self._mark[1]
        seconds = (dispatch + device) / MEASURED
        if seconds > LONG_STEP and dispatch < DISPATCH_SHARE * (dispatch + device):
            return False
        several = self._program.put(stack([piece] * self.length).batch, self.length)
        shapes = jax.tree.map(_shape, (state, several))
        compiler = threading.Thread(
            target=self._compile, args=(*shapes, piece.kind), name="ftrain-compile", daemon=True
        )
        self._coordinator.register_thread(compiler)
        compiler.start()
        return True

    def _compile(self, state: TrainState, batch: Batch, kind: int) -> None:
        with self._coordinator.stop_on_exception():
            self._program.compile(state, Piece(self.length, batch, kind))
            self._compiled.set()

    def is_ready(self) -> bool:
        """Whether the fused call is compiled, and can be compared with single steps."""
        return self._compiled.is_set()

    def take(self, state: TrainState, pieces: list[Piece]) -> tuple[TrainState, float]:
        """The state that fused steps lead to from a copy of `state`, and the seconds they take."""
        several = stack(pieces)
        several = dataclasses.replace(several, batch=self._program.put(several.batch, several.count))
        seconds = 0.0
        result = state
        for _ in range(2):  # the first call of a program takes longer than others
            result = jax.block_until_ready(jax.tree.map(jnp.copy, state))
            started = time.perf_counter()
            result, metrics = self._program(result, several, 1)
            metrics.wait()
            seconds = time.perf_counter() - started
        return result, seconds


def first_difference(one: TrainState, other: TrainState) -> str | None:
    """The name of the first leaf whose bits differ."""
    for (name, left), right in zip(named_leaves(one).items(), jax.tree.leaves(other), strict=True):
        if _bits(left) != _bits(right):
            return name
    return None


def _bits(leaf: jax.Array) -> bytes:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None)
