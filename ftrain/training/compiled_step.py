"""The compiled step: one step or several fused ones, for one device or spread over a mesh."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftrain.cluster.mesh import BATCH_AXES, MODEL
from ftrain.data.shapes import check_integers
from ftrain.gradients.clipping import shard_global_norm
from ftrain.gradients.means import Axis
from ftrain.training.loss import Batch
from ftrain.training.pieces import Piece
from ftrain.training.state import TrainState
from ftrain.training.step import Step
from ftrain.training.step_metrics import StepMetrics
from ftrain.tree import Tree, named_leaves, wide_dtype

M = TypeVar("M")
S = TypeVar("S")
Parallel = Literal["jit", "shard_map", "pmap"]
Function = Callable[[Any, Any], Any]
_PMAP_AXIS = "replicas"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Packed:
    """All metrics in one array. The names are static, so each compiled variant has its own."""

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    values: jax.Array


class CompiledStep:
    """Compiled variants of one step: one per form of a batch and number of steps of a call.

    Metrics have at least the precision of float32.
    """

    def __init__(self, step: Step, mesh: Mesh | None = None, parallel: Parallel = "jit"):
        check_parallel(parallel, mesh)
        self._packed = _pack(step)
        self._mesh: Mesh | None = mesh
        self._parallel: Parallel = parallel
        settings: Any = jax.config  # its attributes are defined at run time
        self._x64: bool = settings.jax_enable_x64
        self._compiled: dict[tuple[int, int], Any] = {}
        self._flops: float | None = None

    def __call__(
        self, state: TrainState, piece: Piece, first: int
    ) -> tuple[TrainState, StepMetrics]:
        """Take the steps of a piece, numbered from `first`; `state` is donated."""
        if not self.is_compiled(piece):
            self.compile(state, piece)
        state, packed = self._compiled[piece.count, piece.kind](state, piece.batch)
        return state, StepMetrics(first, first + piece.count - 1, packed.names, packed.values)

    def _fused(self, state: TrainState, batches: Batch) -> tuple[TrainState, _Packed]:
        """Take several steps in a loop.

        On CPUs XLA compiles some small loops to a single function, in which it rounds in other
        places than in single steps. It does not do so with a loop in which something is sorted.
        """

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, _Packed]:
            state, packed = self._packed(state, batch)
            if jax.default_backend() == "cpu":
                dtype = packed.values.dtype
                ignored = jnp.sort(jnp.stack([state.step.astype(dtype), jnp.ones((), dtype)]))
                packed = dataclasses.replace(
                    packed, values=jnp.concatenate([packed.values, ignored])
                )
            return state, packed

        return jax.lax.scan(step, state, batches)

    def is_compiled(self, piece: Piece) -> bool:
        """Return whether the variant for such a piece is compiled."""
        return (piece.count, piece.kind) in self._compiled

    def compile(self, state: TrainState, piece: Piece) -> None:
        """Compile the variant for such a piece; only shapes matter."""
        self.finish(piece, self.lower(state, piece))

    def lower(self, state: TrainState, piece: Piece) -> Any:
        """Do the first half of compiling; it depends on the thread's context: mesh, 64 bits."""
        if piece.count == 1:
            step = spread(self._packed, self._mesh, self._parallel)
            _check_state(state, jax.eval_shape(step, state, piece.batch)[0])
        return self._jitted(state, stacked=piece.count > 1).lower(state, piece.batch)

    def trace(self, state: TrainState, batch: Batch) -> Any:
        """Return the jaxpr of one step; its first results are the leaves of the new state.

        None for a step of replicas. Only shapes matter. JAX caches the trace, so compiling the step
        does not trace it again.
        """
        return jax.jit(self._packed).trace(state, batch).jaxpr if self._parallel == "jit" else None

    def finish(self, piece: Piece, lowered: Any) -> None:
        """Do the second half of compiling, in any thread."""
        self._compiled[piece.count, piece.kind] = lowered.compile()

    def _jitted(self, state: TrainState, *, stacked: bool) -> Any:
        function = self._fused if stacked else self._packed
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        is_spread = any(len(each.device_set) > 1 for each in jax.tree.leaves(shardings))
        if is_spread and (self._mesh is None or self._mesh.size == 1):
            # The user has placed the state, so it stays there.
            return jax.jit(function, donate_argnums=0, out_shardings=(shardings, None))
        return compile_step(
            function, self._mesh, stacked=stacked, shardings=shardings, parallel=self._parallel
        )

    def put(self, batch: Batch, count: int) -> Batch:
        """Put the batch of a call on the devices, in any thread."""
        if not self._x64:
            check_integers(batch)
        sharding = batch_sharding(self._mesh, stacked=count > 1)
        if sharding is None and count == 1 and jax.default_backend() == "cpu":
            return batch  # it is in the memory of that device already
        with jax.enable_x64(self._x64):
            return put_batch(batch, sharding)

    def flops(self) -> float | None:
        """Return the floating-point operations of one step, if the compiler reports them."""
        if self._flops is None and self._compiled:
            cost = next(iter(self._compiled.values())).cost_analysis()
            self._flops = cost.get("flops", 0.0) if isinstance(cost, dict) else 0.0
        return self._flops or None


def compile_step(
    step: Callable[[TrainState, Batch], tuple[TrainState, M]],
    mesh: Mesh | None = None,
    *,
    stacked: bool = False,
    shardings: Tree | None = None,
    parallel: Parallel = "jit",
) -> Callable[[TrainState, Batch], tuple[TrainState, M]]:
    """Compile `step`; the state is donated and updated in place.

    On a mesh the state has the given `shardings`, one per leaf, or else every device has all of it.
    The batch is split along its first axis; along its second if the batches of several steps are
    `stacked`. With "jit" the compiler spreads the step; a step for "shard_map" or "pmap" takes
    means itself, see `make_step(replicas=...)`.
    """
    step = spread(step, mesh, parallel, stacked=stacked)
    split = batch_sharding(mesh, stacked=stacked)
    if mesh is None or split is None:
        return jax.jit(step, donate_argnums=0)
    replicated = NamedSharding(mesh, PartitionSpec())
    state = replicated if shardings is None else shardings
    whole = all(each.is_fully_replicated for each in jax.tree.leaves(state))
    # Between processes, sharing work takes longer than it saves.
    if parallel == "jit" and whole and replicated.is_fully_addressable:
        step = _sharing(step, mesh)
    return jax.jit(
        step, donate_argnums=0, in_shardings=(state, split), out_shardings=(state, replicated)
    )


def _sharing(step: Callable[[S, Batch], M], mesh: Mesh) -> Callable[[S, Batch], M]:
    @functools.wraps(step)
    def traced(state: S, batch: Batch) -> M:
        with shard_global_norm(mesh):
            return step(state, batch)

    return traced


def batch_sharding(mesh: Mesh | None, *, stacked: bool = False) -> NamedSharding | None:
    """Return the sharding of a batch over a mesh; None if there is only one device."""
    if mesh is None or mesh.size == 1:
        return None
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
    return NamedSharding(mesh, PartitionSpec(None, axes) if stacked else PartitionSpec(axes))


def put_batch(batch: Batch, sharding: NamedSharding | None) -> Batch:
    """Put a batch, or the part of it that this process has, on the devices."""
    if sharding is None:
        return jax.device_put(batch)
    if sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, sharding), batch)


def axis_of(parallel: Parallel) -> Axis | None:
    """Return the axis for `make_step(replicas=...)`; None with "jit", which has no replicas."""
    return {"jit": None, "shard_map": BATCH_AXES, "pmap": _PMAP_AXIS}[parallel]


def check_parallel(parallel: str, mesh: Mesh | None) -> None:
    """Raise ValueError unless `parallel` is known and fits the mesh."""
    if parallel not in get_args(Parallel):
        raise ValueError(
            f"parallel must be one of {', '.join(get_args(Parallel))}, got {parallel!r}"
        )
    if parallel == "jit":
        return
    if mesh is None:
        raise ValueError(f'parallel="{parallel}" needs a mesh: ftrain.cluster.make_mesh()')
    if mesh.shape.get(MODEL, 1) > 1:
        raise ValueError(
            f'parallel="{parallel}" has the whole model on every device: the axis model must be 1'
        )


def spread(
    function: Function, mesh: Mesh | None, parallel: Parallel, *, stacked: bool = False
) -> Function:
    """`function(state, batch)` as a program for each device, with its part of the batch.

    With "jit" the function is returned as it is: the compiler spreads it.
    """
    if parallel == "jit" or mesh is None:
        return function
    whole = PartitionSpec()
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
    if parallel == "shard_map":
        part = PartitionSpec(None, axes) if stacked else PartitionSpec(axes)
        # With check_vma derivatives would be summed over the replicas, a second time.
        return jax.shard_map(
            function, mesh=mesh, in_specs=(whole, part), out_specs=(whole, whole), check_vma=False
        )
    if jax.process_count() > 1:  # inside jit, pmap only supports one process
        replicas = Mesh(mesh.devices.reshape(-1), (_PMAP_AXIS,))
        part = PartitionSpec(_PMAP_AXIS)
        return jax.shard_map(
            function,
            mesh=replicas,
            in_specs=(whole, part),
            out_specs=(whole, whole),
            check_vma=False,
        )
    mapped = jax.pmap(
        function,
        axis_name=_PMAP_AXIS,
        in_axes=(None, 0),
        out_axes=(None, None),
        devices=list(mesh.devices.flat),
    )

    def split(leaf: Any) -> Any:
        return leaf.reshape(mesh.size, -1, *leaf.shape[1:])

    return lambda state, batch: mapped(state, jax.tree.map(split, batch))


def _pack(step: Step) -> Callable[[TrainState, Batch], tuple[TrainState, _Packed]]:
    def packed_step(state: TrainState, batch: Batch) -> tuple[TrainState, _Packed]:
        state, metrics = step(state, batch)
        for name, value in metrics.items():
            if jnp.ndim(value) != 0:
                raise ValueError(
                    f"metric {name} must be a scalar, got shape {jnp.shape(value)}; take its mean"
                )
        dtype = wide_dtype(jnp.float32, *metrics.values())
        values = [jnp.asarray(value, dtype) for value in metrics.values()]
        return state, _Packed(tuple(metrics), jnp.stack(values) if values else jnp.zeros(0))

    return packed_step


def _check_state(before: TrainState, after: TrainState) -> None:
    """Raise TypeError if the step changes the structure, shapes or dtypes of its state."""
    old = named_leaves(before)
    new = named_leaves(after)
    for name in itertools.chain(old, new):
        found, expected = (
            _describe(leaves[name]) if name in leaves else "missing" for leaves in (new, old)
        )
        if found != expected:
            raise TypeError(
                f"the step changes its state: leaf {name} is {found} after it, and {expected} "
                "before; a step must keep the structure, shapes and dtypes of its state"
            )
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TypeError(
            f"the step changes the types of its state: it returned {type(after).__name__}, "
            f"expected the structure of the {type(before).__name__} that it was given"
        )


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def use_compilation_cache() -> None:
    """Cache compiled programs in the user's cache directory, unless JAX is configured otherwise."""
    settings: Any = jax.config  # its attributes are defined at run time
    if settings.jax_compilation_cache_dir is not None or not settings.jax_enable_compilation_cache:
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(caches / "ftrain" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
