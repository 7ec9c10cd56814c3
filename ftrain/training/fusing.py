"""Fusing: how many steps one compiled call takes."""

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.data import Piece, stack
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
DISPATCH_SHARE = 0.15  # of a long step's time; above it fusing is tried all the same
WARM_UP = 3  # steps that are not measured
MEASURED = 8  # steps that are
LEAST_GAIN = 0.95  # the share of the time that is fast enough to fuse


def check_fuse(fuse: Fuse) -> None:
    if fuse != "auto" and (not isinstance(fuse, int) or isinstance(fuse, bool) or fuse < 1):
        raise ValueError(f'fuse must be "auto" or a whole number >= 1, got {fuse!r}')


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
        fired = [
            step if moment == due else last for moment, last in zip(upcoming, fired, strict=True)
        ]


def best_length(triggers: Sequence[Trigger], start: int, most: int) -> int:
    """The number of steps, at most `most`, with which the fewest calls reach every step at which a hook is due.

    >>> from ftrain.training import every
    >>> best_length([every(steps=100), every(steps=500)], 0, 32)
    25
    """
    ahead = [gap for gap, _ in zip(gaps(triggers, start), range(64), strict=False)]
    finite = [int(gap) for gap in ahead if gap != math.inf] or [most]
    most = min(most, max(finite))
    return min(
        range(1, most + 1), key=lambda length: sum(gap // length + gap % length for gap in finite)
    )


class Fuser:
    """Decides how many steps a fused call takes: so many at most, or, with "auto", what is found to be fastest.

    Either way they are fused only if a trial shows that this changes no bit. (A compiler may choose another way to
    compute a convolution, say, inside of a loop.)
    """

    def __init__(self, fuse: Fuse, program: Program):
        check_fuse(fuse)
        self.length = 1
        self.kind = 0  # the form of batches that was tried; others are not fused
        self.trial: Trial | None = None
        self._fuse: Fuse = fuse
        self._program = program
        self._compiling: threading.Thread | None = None
        self._decided = fuse == 1

    def begin(self, triggers: Sequence[Trigger], start: int) -> None:
        """A run begins, or begins anew, whose hooks have these triggers."""
        if not self._decided:
            choose = functools.partial(best_length, triggers, start)
            self.trial = Trial(self._program, choose, self._fuse, self._compile_behind)

    def _compile_behind(self, work: Callable[[], None]) -> None:
        self._compiling = threading.Thread(target=work, name="ftrain-compile", daemon=True)
        self._compiling.start()
        if self._fuse != "auto":  # who asks for it wants it from the start
            self._compiling.join()

    def give_up(self) -> bool:
        """Take one step a call for good; whether that changes anything."""
        changes = self.trial is not None or self.length > 1
        self.length, self.trial, self._decided = 1, None, True
        return changes

    def explore(self, timing: Timing, state: TrainState, piece: Piece) -> None:
        """All steps so far are finished, the last of them with this piece: go on with the trial, if there is hope."""
        if self.trial is not None and not self.trial.explore(
            timing.dispatch, timing.device, state, piece
        ):
            self.give_up()

    def problem(self) -> str:
        """What went wrong with the fused call, if something did; then there is no more to try."""
        if self.trial is None or self.trial.problem is None:
            return ""
        problem = f"{self.trial.problem}".partition("\n")[0]
        self.give_up()
        return f"steps are not fused: the fused call cannot be compiled: {problem:.200}"

    def close(self) -> None:
        """Wait for a compilation that nobody needs any more, but not for ever."""
        if self._compiling is not None:
            self._compiling.join(60)

    def judge(self, fused: "Taken | None", single: "Taken | None") -> str:
        """Decide, from the same steps taken both ways; answers with what there is to say of it."""
        length, kind = (1, 0) if self.trial is None else (self.trial.length, self.trial.kind)
        self.give_up()
        if fused is None or single is None:
            return ""
        leaf = first_difference(fused, single)
        if leaf is not None:
            return f"steps are not fused: fused ones give other bits, in {leaf} first"
        share = fused.seconds / single.seconds
        if self._fuse == "auto" and share > LEAST_GAIN:
            return ""
        self.length, self.kind = length, kind
        return (
            f"{length} steps are fused into one call, {1 / share:.1f} times as fast"
            if self._fuse == "auto"
            else ""
        )


class Taken(NamedTuple):
    """Some steps that were taken: where they led to, what they measured, and the time they took."""

    state: TrainState
    metrics: np.ndarray
    seconds: float


class Trial:
    """Finds out, while a run goes on in single steps, whether fused ones are as exact and, for "auto", faster.

    For that some single steps are measured first: long ones that are quickly dispatched gain nothing. Then a thread
    compiles the fused call. At last some steps are taken both ways, and compared bit by bit.
    """

    def __init__(
        self,
        program: Program,
        choose: Callable[[int], int],
        fuse: Fuse,
        run_behind: Callable[[Callable[[], None]], None],
    ):
        self.length, self.kind = 0, 0
        self.problem: Exception | None = None  # why the fused call cannot be compiled
        self._program, self._choose, self._fuse, self._run_behind = (
            program,
            choose,
            fuse,
            run_behind,
        )
        self._marks = (WARM_UP, WARM_UP + MEASURED) if fuse == "auto" else (1,)
        self._steps, self._before = 0, (0.0, 0.0)
        self._compiled = threading.Event()

    def is_mark(self) -> bool:
        """Called after every single step: whether all steps should be finished now, and `explore` called."""
        self._steps += 1
        return self._steps in self._marks

    def explore(self, dispatch: float, device: float, state: TrainState, piece: Piece) -> bool:
        """Take the seconds that dispatching, and waiting for the device, took so far; False if fusing is hopeless."""
        if self._steps == self._marks[0]:
            self._before = dispatch, device
            leaves = jax.tree.leaves(piece.batch)
            if not leaves or not all(hasattr(leaf, "dtype") for leaf in leaves):
                return False  # nothing to scan over, or nothing that can be stacked as it is
            room = AUTO_BYTES // max(1, count_bytes(piece.batch))
            self.length = self._choose(
                self._fuse if isinstance(self._fuse, int) else min(AUTO_STEPS, max(1, room))
            )
            if self.length == 1 or (self._fuse == "auto" and count_bytes(state) > STATE_BYTES):
                return False
        if self._steps != self._marks[-1]:
            return True
        dispatch, device = dispatch - self._before[0], device - self._before[1]
        is_long = dispatch + device > LONG_STEP * MEASURED
        if is_long and dispatch < DISPATCH_SHARE * (dispatch + device):
            return False
        self._compile(state, piece)
        return True

    def is_ready(self) -> bool:
        """Whether the fused call is compiled, and can be compared with single steps."""
        return self._compiled.is_set()

    def take(self, state: TrainState, pieces: list[Piece]) -> Taken:
        """The steps of these pieces, fused, from a copy of `state`."""
        several = stack(pieces)
        several = dataclasses.replace(
            several, batch=self._program.put(several.batch, several.count)
        )
        taken: Taken | None = None
        for _ in range(
            2 if self._fuse == "auto" else 1
        ):  # the first call of a program takes longer than others
            copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
            started = time.perf_counter()
            result, metrics = self._program(copy, several, 1)
            metrics.wait()
            taken = Taken(result, metrics.table(), time.perf_counter() - started)
        assert taken is not None
        return taken

    def _compile(self, state: TrainState, piece: Piece) -> None:
        """Compile the fused call: the first half here, the second in a thread."""
        self.kind = piece.kind
        several = Piece(
            self.length,
            self._program.put(stack([piece] * self.length).batch, self.length),
            piece.kind,
        )
        try:
            lowered = self._program.lower(state, several)
        except Exception as error:  # noqa: BLE001 - single steps work, so the run goes on with them
            self.problem = error
            return

        def work() -> None:
            try:
                self._program.finish(several, lowered)
                self._compiled.set()
            except Exception as error:  # noqa: BLE001 - the same
                self.problem = error

        self._run_behind(work)


def first_difference(one: Taken, other: Taken) -> str | None:
    """The name of the first leaf of the state, or else of the metrics, whose bits differ."""
    for (name, left), right in zip(
        named_leaves(one.state).items(), jax.tree.leaves(other.state), strict=True
    ):
        if _bits(left) != _bits(right):
            return f"leaf {name}"
    return None if one.metrics.tobytes() == other.metrics.tobytes() else "the metrics"


def _bits(leaf: jax.Array) -> bytes:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()
