"""How a step is spread over the devices of a mesh: by the compiler, or as one program on each of them."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh, PartitionSpec

from ftrain.cluster.mesh import BATCH_AXES, MODEL
from ftrain.gradients.replicas import Axis

Parallel = Literal["jit", "shard_map", "pmap"]
Function = Callable[[Any, Any], Any]
_PMAP_AXIS = "replicas"


def axis_of(parallel: Parallel) -> Axis | None:
    """The axis over which the replicas of a step take means, `make_step(replicas=...)`; with "jit" there are none."""
    return {"jit": None, "shard_map": BATCH_AXES, "pmap": _PMAP_AXIS}[parallel]


def check_parallel(parallel: str, mesh: Mesh | None) -> None:
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
    """`function(state, batch)` as a program on each device, with the whole state and its part of the batch.

    With "jit" it stays as it is: the compiler spreads it.
    """
    if parallel == "jit" or mesh is None:
        return function
    whole, axes = PartitionSpec(), tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
    if parallel == "shard_map":
        part = PartitionSpec(None, axes) if stacked else PartitionSpec(axes)
        # Unchecked, or derivatives would be summed over the replicas behind the step's back.
        return jax.shard_map(
            function, mesh=mesh, in_specs=(whole, part), out_specs=(whole, whole), check_vma=False
        )
    if (
        jax.process_count() > 1
    ):  # pmap is this very shard_map; but inside of jit it knows one process only
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
