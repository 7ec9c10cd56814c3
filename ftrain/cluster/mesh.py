"""The mesh: devices as a grid whose axes have names."""

import jax
from jax.sharding import AxisType, Mesh

DATA = "data"  # the axis that batches are split over


def make_mesh(data: int = -1) -> Mesh:
    """A mesh of `data` devices, or of all there are if it is -1."""
    available = jax.devices()
    wanted = len(available) if data == -1 else data
    if not 1 <= wanted <= len(available):
        raise ValueError(f"data must be -1 or between 1 and the {len(available)} devices there are, got {data}")
    return jax.make_mesh((wanted,), (DATA,), axis_types=(AxisType.Auto,), devices=available[:wanted])


def split_batch(batch_size: int, mesh: Mesh) -> int:
    """Examples of a batch that fall to each device; they must share evenly."""
    devices = mesh.shape[DATA]
    if batch_size % devices:
        nearest = max(batch_size // devices, 1) * devices
        raise ValueError(
            f"batch_size {batch_size} does not divide over the {devices} devices of the mesh; use {nearest}"
        )
    return batch_size // devices
