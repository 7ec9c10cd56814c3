"""Checkpoints: any pytree, saved so that it can be trusted to come back."""

from ftrain.checkpoints.manager import CheckpointError as CheckpointError
from ftrain.checkpoints.manager import CheckpointManager as CheckpointManager
