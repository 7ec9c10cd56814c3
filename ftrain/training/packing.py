"""Packed metrics: all metrics of a step in one vector, because every array that a call returns costs microseconds."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ftrain.training.objective import Batch
from ftrain.training.state import TrainState
from ftrain.training.step import Step, compile_step


class StepMetrics:
    """The metrics of one step. They stay on the device until they are read, and are read once for all hooks."""

    def __init__(self, names: tuple[str, ...] = (), packed: jax.Array | None = None):
        self._names, self._packed = names, packed
        self._values: dict[str, float] | None = None

    def values(self) -> dict[str, float]:
        """Every metric as a number; waits for the device."""
        if self._values is None:
            numbers = np.asarray(self._packed).tolist() if self._packed is not None else []
            self._values = dict(zip(self._names, numbers, strict=True))
        return self._values

    def read(self, name: str) -> float:
        """One metric as a number; waits for the device."""
        values = self.values()
        if name not in values:
            raise KeyError(f"there is no metric {name}; there are {', '.join(sorted(values)) or 'none yet'}")
        return values[name]

    def wait(self) -> None:
        """Wait until the step has been computed."""
        if self._packed is not None:
            self._packed.block_until_ready()

    def is_ready(self) -> bool:
        """Whether the step has been computed."""
        return self._packed is None or self._packed.is_ready()  # pyright: ignore[reportAttributeAccessIssue] - no stub


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Packed:
    """What a compiled step returns; its names are part of its type, so that each compiled variant has its own."""

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    values: jax.Array


class PackedStep:
    """A compiled step that answers with `StepMetrics`, whose numbers have the precision of float32 at least."""

    def __init__(self, step: Step, mesh: Mesh | None = None):
        self._compiled = compile_step(_pack(step), mesh)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        state, packed = self._compiled(state, batch)
        return state, StepMetrics(packed.names, packed.values)


def _pack(step: Step) -> Callable[[TrainState, Batch], tuple[TrainState, _Packed]]:
    def packed_step(state: TrainState, batch: Batch) -> tuple[TrainState, _Packed]:
        state, metrics = step(state, batch)
        dtype = jnp.result_type(jnp.float32, *metrics.values())
        return state, _Packed(tuple(metrics), jnp.stack([jnp.asarray(value, dtype) for value in metrics.values()]))

    return packed_step
