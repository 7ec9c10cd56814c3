"""Step fusion: how many steps one compiled call takes."""

import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.training.compiled_step import CompiledStep
from ftrain.training.hook_dispatch import IN_FLIGHT, HookDispatch, Position
from ftrain.training.pieces import Piece, stack
from ftrain.training.state import TrainState
from ftrain.training.step_metrics import StepMetrics, Timing
from ftrain.training.trigger import Trigger
from ftrain.tree import Tree, count_bytes, named_leaves

Fuse = int | Literal["auto"]

AUTO_STEPS = 50  # more bring no measurable gain
AUTO_BYTES = 64 << 20  # of the batches of one call
STATE_BYTES = 256 << 20  # the largest state that a trial copies
LONG_STEP = 1e-3  # seconds; dispatching a step of a few leaves takes a tenth of it
DISPATCH_SHARE = 0.15  # of the time of a long step; above it fusion is tried nevertheless
WARM_UP = 3  # steps that are not measured
MEASURED = 8  # steps that are measured
MAX_SHARE = 0.95  # of the time of single steps; fused steps must not take longer
COMPARED_RESULTS = 10_000  # floating-point numbers of a state that are compared, at least
COMPARED_STEPS = 500  # but not in more steps than that
GOLDEN_RATIO = 0.6180339887498949  # its multiples spread evenly between two whole numbers


def check_fuse(fuse: Fuse) -> None:
    """Raise ValueError unless `fuse` is "auto" or a number of steps."""
    if fuse != "auto" and (not isinstance(fuse, int) or isinstance(fuse, bool) or fuse < 1):
        raise ValueError(f'fuse must be "auto" or a whole number >= 1, got {fuse!r}')


def gaps(triggers: Sequence[Trigger], start: int) -> Iterator[float]:
    """Yield the numbers of steps between those with a hook due by count; infinity at the end."""
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
    """Return the length, up to `most`, with which the fewest calls reach all steps with a due hook.

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

    Steps are only fused if a trial finds that this changes no bit: inside a loop the compiler
    may compute a convolution, for example, in another way, or round a sum once instead of twice.
    With "auto" some single steps are measured first: long steps gain nothing, unless dispatching
    them is slow. Then a thread compiles the fused call, while the run continues with single steps.
    """

    def __init__(self, fuse: Fuse, program: CompiledStep):
        check_fuse(fuse)
        self.length = 1
        self.kind = 0  # the form of batches that was tried; others are not fused
        self._fuse: Fuse = fuse
        self._program = program
        self._is_decided = fuse == 1
        self._triggers: Sequence[Trigger] = ()
        self._start = 0
        self._steps = 0  # single steps since the start
        self._before = (0.0, 0.0)  # seconds of dispatching and of waiting, at the first mark
        self._marks = (WARM_UP, WARM_UP + MEASURED) if fuse == "auto" else (1,)
        self._candidate = 1  # the length that is tried
        self._piece: Piece | None = None  # the input of a single step, used by the trial
        self._compiling: threading.Thread | None = None
        self._compiled: Future[None] = Future()

    @property
    def is_decided(self) -> bool:
        """Whether there is nothing left to find out."""
        return self._is_decided

    def begin(self, triggers: Sequence[Trigger], start: int) -> None:
        """Start or restart a run whose hooks have these triggers."""
        if not self._is_decided:
            self._triggers = triggers
            self._start = start
            self._steps = 0
            self._compiled = Future()

    def give_up(self) -> bool:
        """Take single steps from now on; return whether that is a change."""
        changes = not self._is_decided or self.length > 1
        self.length = 1
        self._is_decided = True
        self._piece = None
        return changes

    def count_step(self) -> bool:
        """Count a single step; return whether to call `explore` after it."""
        self._steps += 1
        return self._steps in self._marks or self._compiled.done()

    def explore(self, position: Position, hooks: HookDispatch) -> None:
        """Find out more about fused steps, after all steps so far are finished."""
        hooks.settle()
        assert position.state is not None
        assert position.piece is not None
        message = self._explore(hooks.timing, position.state, position.piece)
        if message:
            hooks.notice(message)

    def close(self) -> None:
        """Wait for a compilation in the background, at most a minute."""
        if self._compiling is not None:
            self._compiling.join(60)

    def _explore(self, timing: Timing, state: TrainState, piece: Piece) -> str:
        """Find out more; return a message for the user, or "". `piece` is the newest input."""
        if self._steps == self._marks[0] and not self._choose_length(timing, state, piece):
            self.give_up()
        elif self._steps == self._marks[-1]:
            if self._fuse == "auto" and not self._can_gain(timing):
                self.give_up()
            else:
                self._compile(state, piece)
        if self._is_decided or not self._compiled.done():
            return ""
        problem = self._compiled.exception()
        if problem is None:
            return self._decide(state)
        self.give_up()
        text = f"{problem}".partition("\n")[0]
        return f"steps are not fused: the fused call cannot be compiled: {text:.200}"

    def _choose_length(self, timing: Timing, state: TrainState, piece: Piece) -> bool:
        """Choose the length to try; return False if steps cannot be fused."""
        self._before = timing.dispatch, timing.device
        leaves = jax.tree.leaves(piece.batch)
        if not leaves or not all(hasattr(leaf, "dtype") for leaf in leaves):
            return False  # nothing to scan over, or nothing that can be stacked as it is
        if self._fuse == "auto":
            room = AUTO_BYTES // max(1, count_bytes(piece.batch))
            most = min(AUTO_STEPS, max(1, room))
        else:
            most = self._fuse
        self._candidate = best_length(self._triggers, self._start, most)
        return self._candidate > 1 and (self._fuse != "auto" or count_bytes(state) <= STATE_BYTES)

    def _can_gain(self, timing: Timing) -> bool:
        dispatch = timing.dispatch - self._before[0]
        device = timing.device - self._before[1]
        is_long = dispatch + device > LONG_STEP * MEASURED
        return not is_long or dispatch >= DISPATCH_SHARE * (dispatch + device)

    def _compile(self, state: TrainState, piece: Piece) -> None:
        """Compile the fused call: the first half here, the second in a thread."""
        self._piece = piece
        compiled = self._compiled
        try:
            several = _stacked(self._program, [piece] * self._candidate)
            lowered = self._program.lower(state, several)
        except Exception as error:  # noqa: BLE001 - single steps still work
            compiled.set_exception(error)
            return

        def work() -> None:
            try:
                self._program.finish(several, lowered)
                compiled.set_result(None)
            except Exception as error:  # noqa: BLE001 - single steps still work
                compiled.set_exception(error)

        self._compiling = threading.Thread(target=work, name="ftrain-compile", daemon=True)
        self._compiling.start()
        if self._fuse != "auto":  # the user requests fused steps from the start
            self._compiling.join()

    def _decide(self, state: TrainState) -> str:
        piece = self._piece
        assert piece is not None
        self.give_up()
        trial = compare(self._program, state, piece, self._candidate)
        if trial.difference is not None:
            return f"steps are not fused: fused ones return other bits, first in {trial.difference}"
        share = trial.fused_seconds / trial.single_seconds
        if self._fuse == "auto" and share > MAX_SHARE:
            return ""
        self.length = self._candidate
        self.kind = piece.kind
        if self._fuse != "auto":
            return ""
        return f"{self.length} steps are fused into one call, {1 / share:.1f} times as fast"


class Trial(NamedTuple):
    """Fused and single steps compared: what differs, if anything, and how long each took."""

    difference: str | None
    fused_seconds: float
    single_seconds: float


def compare(program: CompiledStep, state: TrainState, piece: Piece, length: int) -> Trial:
    """Take the same steps fused and one by one, with batches close to the one given.

    Where two programs round differently, few results differ: of the elements of a moment, one in a
    thousand. So small states are compared many times, each time after more steps and scaled by
    another number, until there were enough results for such a difference to show.
    """
    singles = [_scale_batch(piece, _factor(number)) for number in range(length)]
    several = _stacked(program, singles)
    singles = [
        dataclasses.replace(single, batch=program.put(single.batch, 1)) for single in singles
    ]
    elements = sum(leaf.size for leaf in jax.tree.leaves(state) if _is_float(leaf))
    rounds = max(1, min(COMPARED_RESULTS // max(elements, 1), COMPARED_STEPS) // length)
    _take(program, _scale(state, 1.0), [several])  # the first call of a program takes longer
    trial = Trial(None, math.inf, math.inf)
    for number in range(rounds):
        factor = _factor(length + number)
        _, fused = _take(program, _scale(state, factor), [several])
        state, single = _take(program, _scale(state, factor), singles)
        trial = Trial(
            first_difference(fused, single),
            min(trial.fused_seconds, fused.seconds),
            min(trial.single_seconds, single.seconds),
        )
        if trial.difference is not None:
            break
    return trial


class Taken(NamedTuple):
    """The result of timed steps: the bytes of the leaves of the state, the metrics, and seconds."""

    state: dict[str, bytes]
    metrics: bytes
    seconds: float


def _take(
    program: CompiledStep, state: TrainState, pieces: Sequence[Piece]
) -> tuple[TrainState, Taken]:
    jax.block_until_ready(state)
    started = time.perf_counter()
    metrics: list[StepMetrics] = []
    for piece in pieces:
        state, result = program(state, piece, 1)
        metrics.append(result)
        if len(metrics) > IN_FLIGHT:
            metrics[-IN_FLIGHT].wait()
    metrics[-1].wait()
    seconds = time.perf_counter() - started
    leaves = {name: _bytes(leaf) for name, leaf in named_leaves(state).items()}
    return state, Taken(leaves, b"".join(each.table().tobytes() for each in metrics), seconds)


def first_difference(one: Taken, other: Taken) -> str | None:
    """Return the name of the first leaf of the state, or else of the metrics, whose bits differ."""
    for name, found in one.state.items():
        if found != other.state[name]:
            return f"leaf {name}"
    return None if one.metrics == other.metrics else "the metrics"


def _stacked(program: CompiledStep, pieces: list[Piece]) -> Piece:
    """Return one piece of several steps, on the devices."""
    several = stack(pieces)
    return dataclasses.replace(several, batch=program.put(several.batch, several.count))


def _factor(number: int) -> float:
    """Return a factor near 1, a different one for each `number`."""
    return 0.9 + 0.2 * (number * GOLDEN_RATIO % 1.0)


def _scale_batch(piece: Piece, factor: float) -> Piece:
    return dataclasses.replace(piece, batch=_scale(piece.batch, factor))


def _scale(tree: Tree, factor: float) -> Tree:
    """Return a copy with all floating-point numbers multiplied, in their own precision and place.

    The numbers are multiplied on the host: for a thousand leaves, dispatching a thousand products
    takes longer than copying them there and back.
    """
    leaves, structure = jax.tree.flatten(tree)
    on_devices = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and _is_float(leaf)]
    hosted = [leaf * np.asarray(factor, leaf.dtype) for leaf in jax.device_get(on_devices)]
    scaled = iter(jax.device_put(hosted, [leaf.sharding for leaf in on_devices]))

    def scale(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf * np.asarray(factor, leaf.dtype) if _is_float(leaf) else leaf
        return next(scaled) if _is_float(leaf) else jnp.copy(leaf)

    return structure.unflatten([scale(leaf) for leaf in leaves])


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _bytes(leaf: jax.Array) -> bytes:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()
