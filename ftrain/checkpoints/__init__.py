"""Checkpoints: any pytree, saved so that it can be trusted to come back."""

from ftrain.checkpoints.following import checkpoints_iterator, wait_for_checkpoint
from ftrain.checkpoints.lock import InUseError, hold
from ftrain.checkpoints.manager import CheckpointError, CheckpointManager

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "InUseError",
    "checkpoints_iterator",
    "hold",
    "wait_for_checkpoint",
]
