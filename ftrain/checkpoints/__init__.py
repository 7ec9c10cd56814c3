"""Checkpoints: any pytree, saved so that it can be trusted to come back."""

from ftrain.checkpoints.catalog import Catalog, read_catalog
from ftrain.checkpoints.errors import CheckpointError, DamagedError, MismatchError, SaveError
from ftrain.checkpoints.exporting import export
from ftrain.checkpoints.finding import checkpoint_exists, checkpoint_state, latest_checkpoint
from ftrain.checkpoints.following import checkpoints_iterator, wait_for_checkpoint
from ftrain.checkpoints.lock import HeldElsewhereError, InUseError, hold, is_held
from ftrain.checkpoints.manager import CheckpointManager
from ftrain.checkpoints.reader import CheckpointReader, list_variables, load_variable, open_reader
from ftrain.checkpoints.retention import Record
from ftrain.checkpoints.snapshot import digest_leaves
from ftrain.checkpoints.verifying import verify
from ftrain.checkpoints.vocabulary import VocabInfo
from ftrain.checkpoints.warm_start import init_from_checkpoint, warm_start

__all__ = [
    "Catalog",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointReader",
    "DamagedError",
    "HeldElsewhereError",
    "InUseError",
    "MismatchError",
    "Record",
    "SaveError",
    "VocabInfo",
    "checkpoint_exists",
    "checkpoint_state",
    "checkpoints_iterator",
    "digest_leaves",
    "export",
    "hold",
    "init_from_checkpoint",
    "is_held",
    "latest_checkpoint",
    "list_variables",
    "load_variable",
    "open_reader",
    "read_catalog",
    "verify",
    "wait_for_checkpoint",
    "warm_start",
]
