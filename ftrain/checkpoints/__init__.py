"""Checkpoints: any pytree, saved so that it can be trusted to come back."""

from ftrain.checkpoints.manager import CheckpointError, CheckpointManager

__all__ = [
    "CheckpointError",
    "CheckpointManager",
]
