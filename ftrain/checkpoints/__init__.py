"""Checkpoints: any pytree, saved so that it can be trusted to come back."""

from ftrain.checkpoints.following import checkpoints_iterator, wait_for_checkpoint
from ftrain.checkpoints.lock import InUseError, hold, is_held
from ftrain.checkpoints.manager import CheckpointError, CheckpointManager

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "InUseError",
    "checkpoints_iterator",
    "hold",
    "is_held",
    "wait_for_checkpoint",
]
