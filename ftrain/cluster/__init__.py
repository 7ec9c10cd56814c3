"""The devices and processes that a run is spread over."""

from ftrain.cluster.connecting import connect
from ftrain.cluster.control_protocol import ClusterError, PeerLostError, ProcessMismatchError
from ftrain.cluster.environment import Membership, membership
from ftrain.cluster.mesh import batch_shard, make_mesh, split_batch
from ftrain.cluster.process_group import ProcessGroup, create_local
from ftrain.cluster.sharding import Sharding, bytes_per_device
from ftrain.cluster.spec import ClusterSpec, check_usable, processes

__all__ = [
    "ClusterError",
    "ClusterSpec",
    "Membership",
    "PeerLostError",
    "ProcessGroup",
    "ProcessMismatchError",
    "Sharding",
    "batch_shard",
    "bytes_per_device",
    "check_usable",
    "connect",
    "create_local",
    "make_mesh",
    "membership",
    "processes",
    "split_batch",
]
