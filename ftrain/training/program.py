"""The program: a step compiled for the loop, taken once a call or, fused, several times."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ftrain.data import Piece
from ftrain.training.metrics import Metrics
from ftrain.training.objective import Batch
from ftrain.training.state import TrainState
from ftrain.training.step import Step, batch_sharding, compile_step
from ftrain.tree import named_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Packed:
    """All metrics in one array; their names are part of its type, so that each compiled variant has its own."""

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    values: jax.Array


class Program:
    """Compiled variants of one step: for each shape of a batch, and for each number of steps that a call takes.

    Metrics have the precision of float32 at least.
    """

    def __init__(self, step: Step, mesh: Mesh | None = None):
        packed = _pack(step)
        self._mesh = mesh
        self._one = compile_step(packed, mesh)
        self._fused = compile_step(lambda state, batches: jax.lax.scan(packed, state, batches), mesh, stacked=True)
        self._compiled: dict[tuple[int, int], Any] = {}
        self._flops: float | None = None

    def __call__(self, state: TrainState, piece: Piece, first: int) -> tuple[TrainState, Metrics]:
        """Take the steps of a piece, the first of which has the number `first`; `state` cannot be used again."""
        if not self.is_compiled(piece):
            self.compile(state, piece)
        state, packed = self._compiled[piece.count, piece.kind](state, piece.batch)
        return state, Metrics(first, first + piece.count - 1, packed.names, packed.values)

    def is_compiled(self, piece: Piece) -> bool:
        return (piece.count, piece.kind) in self._compiled

    def compile(self, state: TrainState, piece: Piece) -> None:
        """Compile for such a piece; only shapes are looked at."""
        jitted: Any = self._one if piece.count == 1 else self._fused
        if piece.count == 1:
            _check_state(state, jitted.eval_shape(state, piece.batch)[0])
        self._compiled[piece.count, piece.kind] = jitted.lower(state, piece.batch).compile()

    def put(self, batch: Batch, count: int) -> Batch:
        """The batch of a call, on the devices."""
        sharding = batch_sharding(self._mesh, stacked=count > 1)
        if sharding is None and count == 1 and jax.default_backend() == "cpu":
            return batch  # it is in the memory of that device already, and the call itself takes it quicker
        return jax.device_put(batch) if sharding is None else jax.device_put(batch, sharding)

    def flops(self) -> float | None:
        """Floating-point operations of one step, if the compiler tells; it counts the steps of a fused call once."""
        if self._flops is None and self._compiled:
            cost = next(iter(self._compiled.values())).cost_analysis()
            self._flops = cost.get("flops", 0.0) if isinstance(cost, dict) else 0.0
        return self._flops or None


def _pack(step: Step) -> Callable[[TrainState, Batch], tuple[TrainState, _Packed]]:
    def packed_step(state: TrainState, batch: Batch) -> tuple[TrainState, _Packed]:
        state, metrics = step(state, batch)
        for name, value in metrics.items():
            if jnp.ndim(value) != 0:
                raise ValueError(f"metric {name} must be a scalar, got shape {jnp.shape(value)}; take its mean")
        dtype = jnp.result_type(jnp.float32, *metrics.values())
        values = [jnp.asarray(value, dtype) for value in metrics.values()]
        return state, _Packed(tuple(metrics), jnp.stack(values) if values else jnp.zeros(0))

    return packed_step


def _check_state(before: TrainState, after: TrainState) -> None:
    """A step must answer with a state like the one it was given, or it could not be taken again."""
    old, new = named_leaves(before), named_leaves(after)
    for name in itertools.chain(old, new):
        found, wanted = (_describe(leaves[name]) if name in leaves else "missing" for leaves in (new, old))
        if found != wanted:
            raise TypeError(
                f"the step changes its state: leaf {name} is {found} after it, and {wanted} before; "
                "a step must keep the structure, shapes and dtypes of its state"
            )
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TypeError(
            f"the step changes the types of its state: {type(after).__name__} after {type(before).__name__}"
        )


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
