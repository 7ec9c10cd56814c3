"""The devices a run is spread over."""

from ftrain.cluster.mesh import make_mesh as make_mesh
from ftrain.cluster.mesh import split_batch as split_batch
