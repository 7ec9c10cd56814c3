"""The supply: the batches of a run in pieces, each for one call, made ahead by a thread."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ftrain.data import Piece, Pipeline, feed_pieces
from ftrain.data.pieces import Put
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
    ):
        self._pieces = feed_pieces(data, start, _lengths(triggers, start, length), put)
        self._spare: deque[Piece] = deque()
        self.has_failed = False

    def take(self, most: float) -> Piece:
        """The next piece; what it has beyond `most` steps waits for the next time. StopIteration at the end."""
        try:
            piece = self._spare.popleft() if self._spare else next(self._pieces)
        except Exception:
            self.has_failed = True
            raise
        if piece.count > most:
            piece, *rest = piece.split()
            self.give_back(rest)
        return piece

    def take_singles(self, count: int) -> list[Piece]:
        """So many pieces of one step each and of one form, or none at all if there are no more such."""
        taken: list[Piece] = []
        try:
            while len(taken) < count:
                taken.append(self.take(1))
        except StopIteration:
            pass
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
            steps = length() if gap >= length() else 1
            yield steps
            gap -= steps
