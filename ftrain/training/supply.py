"""The supply: the batches of a run in pieces, each for one call, made ahead by a thread."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ftrain.data import Piece, Pipeline, feed_pieces
from ftrain.data.pieces import Put
from ftrain.data.shapes import ShapeWatch
from ftrain.training.fusing import gaps
from ftrain.training.trigger import Trigger


class Supply:
    """Pieces from step `start` on. They are made of as many steps as `length` says, up to the steps when hooks are due.

    That is a guess: hooks may change their minds. Who takes a piece says how many steps it may have at most.
    """

    def __init__(
        self,
        data: Pipeline | Iterable[Any],
        start: int,
        triggers: Sequence[Trigger],
        length: Callable[[], int],
        put: Put,
        *,
        shapes: ShapeWatch,
        stop: Callable[[], bool],
    ):
        self._pieces = feed_pieces(
            data, start, _lengths(triggers, start, length), put, shapes=shapes, stop=stop
        )
        self._spare: deque[Piece] = deque()
        self.has_failed = False

    def take(self, most: float, kind: int | None = None) -> Piece:
        """The next piece, of several steps only if its batches have the form `kind`; StopIteration at the end.

        What it has beyond `most` steps waits for the next time.
        """
        try:
            piece = self._spare.popleft() if self._spare else next(self._pieces)
        except Exception:
            self.has_failed = True
            raise
        if piece.count > most or (piece.count > 1 and piece.kind != kind):
            piece, *rest = piece.split()
            self.give_back(rest)
        return piece

    def is_ready(self, timeout: float) -> bool:
        """Wait at most so long for `take` to have something, the end of the data included."""
        return bool(self._spare) or self._pieces.is_ready(timeout)

    def take_singles(self, count: int) -> list[Piece]:
        """So many pieces of one step each and of one form, or none at all if there are no more such."""
        taken: list[Piece] = []
        try:
            while len(taken) < count:
                taken.append(self.take(1))
        except Exception:  # noqa: BLE001 - it comes again when what was taken is used up
            self.has_failed = False
        if len(taken) == count and len({piece.kind for piece in taken}) == 1:
            return taken
        self.give_back(taken)
        return []

    def give_back(self, pieces: Sequence[Piece]) -> None:
        """Pieces that were not used after all."""
        self._spare.extendleft(reversed(pieces))

    def close(self) -> None:
        self._pieces.close()


def _lengths(triggers: Sequence[Trigger], start: int, length: Callable[[], int]) -> Iterator[int]:
    for gap in gaps(triggers, start):
        while gap > 0:
            steps = length()
            steps = steps if gap >= steps else 1
            yield steps
            gap -= steps
