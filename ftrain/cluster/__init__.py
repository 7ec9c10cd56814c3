"""The devices a run is spread over."""

from ftrain.cluster.mesh import make_mesh, split_batch

__all__ = [
    "make_mesh",
    "split_batch",
]
