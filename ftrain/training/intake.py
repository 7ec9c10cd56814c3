"""The intake: where a run takes its input from, ready before it is needed, and in step with other processes."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ftrain.coordination import EndOfData
from ftrain.data import Piece, Pipeline
from ftrain.data.pieces import Put
from ftrain.data.shapes import ShapeWatch
from ftrain.training.hook import DATA_ENDED, Hook
from ftrain.training.late import Late
from ftrain.training.objective import Batch
from ftrain.training.supply import Supply
from ftrain.training.together import Together
from ftrain.training.trigger import Trigger

FINISHED = (StopIteration, EndOfData)  # what ends a run cleanly, whoever raises it


class Intake:
    """The input of a run, from any step on.

    Args:
      put: puts a batch on the devices.
      hooks: that change batches before that.
      straggler_timeout: seconds after which a step goes on without data.
      stop: answers, while data are waited for, whether they are still needed.
    """

    def __init__(
        self,
        data: Pipeline | Iterable[Any],
        put: Put,
        hooks: Sequence[Hook],
        together: Together | None,
        straggler_timeout: float | None,
        stop: Callable[[], bool],
    ):
        self.preparers = [hook for hook in hooks if type(hook).prepare is not Hook.prepare]
        if straggler_timeout and not (
            isinstance(data, Pipeline) and data.is_uniform and data.steps is None
        ):
            raise ValueError(
                "straggler_timeout needs a Pipeline whose batches have one shape and never end: no epochs"
            )
        self._late = Late(straggler_timeout, put) if straggler_timeout else None
        self._data, self._put, self._stop = (
            data,
            put if self._late is None else self._late.put,
            stop,
        )
        self._together = (
            None if isinstance(data, Pipeline) else together
        )  # a pipeline ends at one step for all
        self._agreed = (
            0  # the newest step for which the processes have told each other whether they have data
        )
        self._shapes = ShapeWatch()
        self._supply: Supply | None = None

    @property
    def can_go_on(self) -> bool:
        """Whether there would be data after a recovery: an iterator that has failed gives no more."""
        return (
            isinstance(self._data, Pipeline) or self._supply is None or not self._supply.has_failed
        )

    def begin(self, step: int, triggers: Sequence[Trigger], length: Callable[[], int]) -> None:
        """Go on after `step`; data that cannot be asked for a step go on where they stand."""
        if self._supply is not None and not isinstance(self._data, Pipeline):
            return
        self.close()
        put = self._preparing(step)
        self._supply = Supply(
            self._data, step, triggers, length, put, shapes=self._shapes, stop=self._stop
        )

    def take(self, step: int, most: float, kind: int) -> Piece:
        """The input of the steps after `step`, at most so many; EndOfData or StopIteration if there is no more."""
        assert self._supply is not None
        if self._late is not None:
            return self._late.take(self._supply)
        if self._together is None:
            return self._supply.take(most, kind)
        try:
            piece = self._supply.take(1)
        except FINISHED:
            piece = None
        if (
            not self._all_have(self._together, step + 1, None if piece is None else piece.examples)
            or piece is None
        ):
            raise EndOfData(DATA_ENDED)
        return piece

    def take_singles(self, count: int) -> list[Piece]:
        """So many pieces of one step each and of one form, or none at all."""
        return [] if self._supply is None else self._supply.take_singles(count)

    def give_back(self, pieces: Sequence[Piece]) -> None:
        """Pieces that were not used after all."""
        if self._supply is not None:
            self._supply.give_back(pieces)

    def end(self, step: int) -> None:
        """`step` was the last one: other processes, which may wait for the data of this one, must hear of it."""
        if self._together is not None and self._agreed <= step:
            self._all_have(self._together, step + 1, None)

    def close(self) -> None:
        if self._supply is not None:
            self._supply.close()

    def _all_have(self, together: Together, step: int, examples: int | None) -> bool:
        self._agreed = step
        return together.all_have(f"the data of step {step}", examples)

    def _preparing(self, step: int) -> Put:
        """How batches from the one after `step` on are put on the devices."""
        if not self.preparers:
            return self._put
        steps = itertools.count(step + 1)

        def prepare_and_put(batch: Batch, count: int) -> Batch:
            number = next(steps)
            for hook in self.preparers:
                batch = hook.prepare(number, batch)
            return self._put(batch, count)

        return prepare_and_put
