"""Data that come late: a step need not wait for them, if it can do without."""

import dataclasses
from typing import Any

import jax
import numpy as np

from ftrain.data import Piece
from ftrain.data.pieces import Put
from ftrain.training.step import CONTRIBUTES
from ftrain.training.supply import Supply


class Late:
    """Waits for data so many seconds; then it gives a batch of zeros that says of itself that it counts for nothing."""

    def __init__(self, timeout: float, put: Put):
        self._timeout, self._put_on_devices = timeout, put
        self._example: dict[str, Any] | None = None  # a batch as this process has it
        self._last: Piece | None = None

    def put(self, batch: Any, count: int) -> Any:
        """A batch on the devices, with an entry that says that it counts."""
        if not isinstance(batch, dict):
            raise TypeError(
                f"straggler_timeout needs batches that are dicts, got a {type(batch).__name__}"
            )
        self._example = self._example or batch
        return self._put_on_devices(batch | {CONTRIBUTES: np.ones(_rows(batch), np.float32)}, count)

    def take(self, supply: Supply) -> Piece:
        """The next piece, or one that counts for nothing, if that takes too long; the first one is waited for."""
        if self._last is None or supply.is_ready(self._timeout):
            self._last = supply.take(1)
            return self._last
        assert self._example is not None
        nothing: dict[str, Any] = jax.tree.map(np.zeros_like, self._example)
        nothing[CONTRIBUTES] = np.zeros(_rows(self._example), np.float32)
        return dataclasses.replace(self._last, batch=self._put_on_devices(nothing, 1))


def _rows(batch: dict[str, Any]) -> int:
    return len(next(iter(batch.values())))
