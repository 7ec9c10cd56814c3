"""Packed metrics: all metrics of a step in one vector, because every array that a call returns costs microseconds."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ftrain.training.state import TrainState
from ftrain.training.step import Batch, Step, compile_step


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


class PackedStep:
    """A compiled step that answers with `StepMetrics`."""

    def __init__(self, step: Step, mesh: Mesh | None = None):
        self._names: tuple[str, ...] = ()
        self._compiled = compile_step(self._pack(step), mesh)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        state, packed = self._compiled(state, batch)
        return state, StepMetrics(self._names, packed)

    def _pack(self, step: Step):
        def packed_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
            state, metrics = step(state, batch)
            self._names = tuple(metrics)  # known once the step is traced, before its first result
            dtype = jnp.result_type(jnp.float32, *metrics.values())
            return state, jnp.stack([jnp.asarray(value, dtype) for value in metrics.values()])

        return packed_step
