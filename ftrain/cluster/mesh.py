"""The mesh: a grid of devices with named axes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA = "data"  # replicas: each has a part of the batch
FSDP = "fsdp"  # replicas too, and the state is split over them
MODEL = "model"  # devices that share the work on one part of the batch
AXES = (DATA, FSDP, MODEL)
BATCH_AXES = (DATA, FSDP)  # the axes that batches are split over


def make_mesh(data: int = -1, fsdp: int = 1, model: int = 1) -> Mesh:
    """Return a mesh of data x fsdp x model devices. One size may be -1: the rest of them.

    A job of one process may leave devices unused. In a job of several, each process uses all of its
    devices, and holds one slice of the batch.
    """
    devices = jax.devices()
    axes = sizes(data, fsdp, model, len(devices), fill=jax.process_count() > 1)
    mesh = _by_topology(devices[: math.prod(axes.values())], axes)
    if mesh is None or not _is_sliced(_holders(mesh)):
        mesh = _by_process(devices[: math.prod(axes.values())], axes)
        batch_shard(mesh)  # raises if the processes cannot share batches
    return mesh


def sizes(data: int, fsdp: int, model: int, devices: int, *, fill: bool = False) -> dict[str, int]:
    """Return the size of each axis of a mesh; with `fill`, it must use all devices.

    >>> sizes(-1, 4, 1, devices=64)
    {'data': 16, 'fsdp': 4, 'model': 1}
    """
    asked = {DATA: data, FSDP: fsdp, MODEL: model}
    for axis, size in asked.items():
        if size != -1 and not 1 <= size <= devices:
            raise ValueError(
                f"{axis} must be -1 or between 1 and the {devices} available devices, got {size}"
            )
    rest = [axis for axis, size in asked.items() if size == -1]
    if len(rest) > 1:
        given = ", ".join(f"{axis}=-1" for axis in rest)
        raise ValueError(f"only one axis of a mesh can be -1, the rest of the devices; got {given}")
    known = math.prod(size for size in asked.values() if size != -1)
    if rest and devices % known == 0:
        return asked | {rest[0]: devices // known}
    if rest or known > devices or (fill and known != devices):
        raise ValueError(_misfit(asked, devices, fill=fill or bool(rest)))
    return asked


def check_processes(
    processes: int,
    devices_each: int,
    batch_size: int,
    *,
    data: int = -1,
    fsdp: int = 1,
    model: int = 1,
) -> dict[str, int]:
    """Return the axes of a mesh over processes that need not exist yet.

    ValueError if they could not train together.

    >>> check_processes(2, 4, batch_size=64, fsdp=2)
    {'data': 4, 'fsdp': 2, 'model': 1}
    """
    axes = sizes(data, fsdp, model, processes * devices_each, fill=processes > 1)
    split_batch(batch_size, axes)
    size = axes[MODEL]
    parts = math.prod(axes[axis] for axis in BATCH_AXES)
    holders = [
        {device // devices_each for device in range(part * size, (part + 1) * size)}
        for part in range(parts)
    ]
    if not _is_sliced(holders):
        raise ValueError(
            f"each process must hold one slice of the batch, but has {devices_each} devices "
            f"with {_show(axes)}; "
            "choose a model axis that divides their number or is a multiple of it"
        )
    return axes


def split_batch(batch_size: int, mesh: Mesh | Mapping[str, int]) -> int:
    """Return the examples of a batch for each device of a mesh; they must divide evenly."""
    axes = mesh.shape if isinstance(mesh, Mesh) else mesh
    parts = math.prod(axes.get(axis, 1) for axis in BATCH_AXES)
    if batch_size % parts:
        below = batch_size // parts * parts
        nearest = f"{below} or {below + parts}" if below > 0 else f"{parts}"
        along = "" if math.prod(axes.values()) == parts else f" along {' and '.join(BATCH_AXES)}"
        raise ValueError(
            f"batch_size {batch_size} does not divide over the {parts} devices of the mesh{along}; "
            f"use {nearest}"
        )
    return batch_size // parts


def batch_shard(mesh: Mesh) -> tuple[int, int]:
    """Return the index of this process's slice of every batch, and the number of slices.

    Processes that share a model axis hold the same slice.
    """
    holders = _holders(mesh)
    process = jax.process_index()
    parts = _parts_of(holders)
    if process not in parts:
        raise ValueError(
            f"process {process} has no device in the mesh, "
            f"whose devices are of process {_list(sorted(parts))}"
        )
    if not _is_sliced(holders):
        held = ", ".join(
            f"process {owner} has {_list(own)}" for owner, own in sorted(parts.items())
        )
        raise ValueError(
            "each process must hold one slice of the batch, and all slices must have one size; "
            f"with {_show(mesh.shape)}, of {len(holders)} parts {held}; "
            "give all processes the same number of devices, and "
            "choose a model axis that divides their number or is a multiple of it"
        )
    own = parts[process]
    return own[0] // len(own), len(holders) // len(own)


def _by_topology(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh | None:
    """Return the mesh that jax lays out along the links between devices, or None if it cannot."""
    try:
        return jax.make_mesh(
            tuple(axes.values()), tuple(axes), axis_types=_auto(axes), devices=devices
        )
    except (NotImplementedError, ValueError, AssertionError):
        return None  # the sizes are valid, but jax has no layout for some topologies


def _by_process(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh:
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return Mesh(
        np.array(ordered).reshape(tuple(axes.values())), tuple(axes), axis_types=_auto(axes)
    )


def _auto(axes: Mapping[str, int]) -> tuple[AxisType, ...]:
    return (AxisType.Auto,) * len(axes)


def _holders(mesh: Mesh) -> list[set[int]]:
    """Return the processes that hold each part of the batch."""
    split = [axis for axis in BATCH_AXES if axis in mesh.axis_names]
    grid = np.moveaxis(
        mesh.devices, [mesh.axis_names.index(axis) for axis in split], range(len(split))
    )
    parts = math.prod(mesh.shape[axis] for axis in split)
    return [{device.process_index for device in row} for row in grid.reshape(parts, -1)]


def _parts_of(holders: Sequence[set[int]]) -> dict[int, list[int]]:
    """Return the parts of the batch that each process holds, in order."""
    processes = set().union(*holders)
    return {
        process: [n for n, own in enumerate(holders) if process in own] for process in processes
    }


def _is_sliced(holders: Sequence[set[int]]) -> bool:
    """True if the parts of every process are one slice of the batch, and all slices are equal."""
    parts = list(_parts_of(holders).values())
    size = len(parts[0])
    return all(own[0] % size == 0 and own == list(range(own[0], own[0] + size)) for own in parts)


def _misfit(asked: Mapping[str, int], devices: int, *, fill: bool) -> str:
    """Describe why sizes do not fit, by the largest one that another value would fix."""
    given = {axis: size for axis, size in asked.items() if size != -1}
    has_rest = len(given) < len(asked)
    for axis in sorted(given, key=lambda axis: -given[axis]):
        room, left = divmod(devices, math.prod(given.values()) // given[axis])
        if room == 0 or (fill and left):
            continue
        allowed = f"{room} or -1" if fill else f"between 1 and {room}"
        if has_rest:
            allowed = _list([size for size in range(1, room + 1) if room % size == 0], "or")
        others = _show({name: size for name, size in asked.items() if name != axis})
        available = f"the {devices} available devices"
        relation = "fill" if fill else "fit"
        return (
            f"{axis} must be {allowed}, got {given[axis]}; "
            f"with {others} the mesh must {relation} {available}"
        )
    relation = "divide" if has_rest else "make up" if fill else "fit"
    return f"{_show(given, ' x ')} must {relation} the {devices} available devices"


def _list(values: Sequence[int], last: str = "and") -> str:
    words = [f"{value}" for value in values]
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else words[0]


def _show(axes: Mapping[str, int], between: str = ", ") -> str:
    return between.join(f"{axis}={size}" for axis, size in axes.items())
