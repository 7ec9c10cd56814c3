"""Step fusion: how many steps one compiled call takes."""

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
from ftrain.training.compiled_step import CompiledStep
from ftrain.training.state import TrainState
from ftrain.training.timing import Timing
from ftrain.training.trigger import Trigger
from ftrain.tree import count_bytes, named_leaves

Fuse = int | Literal["auto"]

AUTO_STEPS = 50  # more bring no measurable gain
AUTO_BYTES = 64 << 20  # of the batches of one call
STATE_BYTES = 256 << 20  # the largest state that a trial copies
LONG_STEP = 1e-3  # seconds; dispatching a step of a few leaves takes a tenth of it
DISPATCH_SHARE = 0.15  # of the time of a long step; above it fusion is tried nevertheless
WARM_UP = 3  # steps that are not measured
MEASURED = 8  # steps that are measured
MAX_SHARE = 0.95  # of the time of single steps; fused steps must not take longer


def check_fuse(fuse: Fuse) -> None:
    """Raise ValueError unless `fuse` is "auto" or a number of steps."""
    if fuse != "auto" and (not isinstance(fuse, int) or isinstance(fuse, bool) or fuse < 1):
        raise ValueError(f'fuse must be "auto" or a whole number >= 1, got {fuse!r}')


def gaps(triggers: Sequence[Trigger], start: int) -> Iterator[float]:
    """The numbers of steps between those at which a hook is due by count; infinity at the end."""
    step = start
    fired = [trigger.counts_from(start) for trigger in triggers]
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
    """The length, at most `most`, with which the fewest calls reach all steps with a due hook.

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
    """Decides how many steps a fused call takes: up to a given number or, with "auto", the fastest.

    Steps are only fused if a trial shows that this changes no bit: inside of a loop the compiler
    may compute a convolution, for example, in another way.
    """

    def __init__(self, fuse: Fuse, program: CompiledStep):
        check_fuse(fuse)
        self.length = 1
        self.kind = 0  # the form of batches that was tried; others are not fused
        self.trial: Trial | None = None
        self._fuse: Fuse = fuse
        self._program = program
        self._compiling: threading.Thread | None = None
        self._decided = fuse == 1

    def begin(self, triggers: Sequence[Trigger], start: int) -> None:
        """Start or restart a run whose hooks have these triggers."""
        if not self._decided:
            choose = functools.partial(best_length, triggers, start)
            self.trial = Trial(self._program, choose, self._fuse, self._compile_in_background)

    def _compile_in_background(self, work: Callable[[], None]) -> None:
        self._compiling = threading.Thread(target=work, name="ftrain-compile", daemon=True)
        self._compiling.start()
        if self._fuse != "auto":  # the user asked for fused steps from the start
            self._compiling.join()

    def give_up(self) -> bool:
        """Take single steps from now on; return whether that is a change."""
        changes = self.trial is not None or self.length > 1
        self.length = 1
        self.trial = None
        self._decided = True
        return changes

    def explore(self, timing: Timing, state: TrainState, piece: Piece) -> None:
        """Continue the trial after all steps so far are finished; `piece` is that of the last one."""
        if self.trial is not None and not self.trial.explore(
            timing.dispatch, timing.device, state, piece
        ):
            self.give_up()

    def problem(self) -> str:
        """The error of compiling the fused call, or an empty text; the trial then ends."""
        if self.trial is None or self.trial.problem is None:
            return ""
        problem = f"{self.trial.problem}".partition("\n")[0]
        self.give_up()
        return f"steps are not fused: the fused call cannot be compiled: {problem:.200}"

    def close(self) -> None:
        """Wait for a compilation in the background, at most a minute."""
        if self._compiling is not None:
            self._compiling.join(60)

    def judge(self, fused: "Taken | None", single: "Taken | None") -> str:
        """Decide from the same steps taken both ways; return a message for the user, or ''."""
        length, kind = (1, 0) if self.trial is None else (self.trial.length, self.trial.kind)
        self.give_up()
        if fused is None or single is None:
            return ""
        leaf = first_difference(fused, single)
        if leaf is not None:
            return f"steps are not fused: fused ones give other bits, in {leaf} first"
        share = fused.seconds / single.seconds
        if self._fuse == "auto" and share > MAX_SHARE:
            return ""
        self.length = length
        self.kind = kind
        return (
            f"{length} steps are fused into one call, {1 / share:.1f} times as fast"
            if self._fuse == "auto"
            else ""
        )


class Taken(NamedTuple):
    """The result of some steps: state, metrics and seconds."""

    state: TrainState
    metrics: np.ndarray
    seconds: float


class Trial:
    """Finds out, while a run takes single steps, whether fused ones are exact and, for "auto", faster.

    First some single steps are measured: long steps gain nothing, unless dispatching them is slow.
    Then a thread compiles the fused call. Then some steps are taken both ways and compared bit by
    bit.
    """

    def __init__(
        self,
        program: CompiledStep,
        choose: Callable[[int], int],
        fuse: Fuse,
        run_in_background: Callable[[Callable[[], None]], None],
    ):
        self.length = 0
        self.kind = 0
        self.problem: Exception | None = None  # why the fused call cannot be compiled
        self._program = program
        self._choose = choose
        self._fuse = fuse
        self._run_in_background = run_in_background
        self._marks = (WARM_UP, WARM_UP + MEASURED) if fuse == "auto" else (1,)
        self._steps = 0
        self._before = (0.0, 0.0)  # seconds of dispatching and of waiting, at the first mark
        self._compiled = threading.Event()

    def is_mark(self) -> bool:
        """Count a single step; return whether to settle all steps and call `explore` after it."""
        self._steps += 1
        return self._steps in self._marks

    def explore(self, dispatch: float, device: float, state: TrainState, piece: Piece) -> bool:
        """Continue, given the seconds spent on both so far; return False if fusion cannot gain."""
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
        """Whether the fused call is compiled."""
        return self._compiled.is_set()

    def take(self, state: TrainState, pieces: list[Piece]) -> Taken:
        """Take the steps of these pieces fused, from a copy of `state`."""
        several = stack(pieces)
        several = dataclasses.replace(
            several, batch=self._program.put(several.batch, several.count)
        )
        taken: Taken | None = None
        calls = 2 if self._fuse == "auto" else 1  # the first call of a program takes longer
        for _ in range(calls):
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
        except Exception as error:  # noqa: BLE001 - single steps work
            self.problem = error
            return

        def work() -> None:
            try:
                self._program.finish(several, lowered)
                self._compiled.set()
            except Exception as error:  # noqa: BLE001 - the same
                self.problem = error

        self._run_in_background(work)


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
