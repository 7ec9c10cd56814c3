"""Checkpoints: save any pytree, verify what was written, and restore it."""

from ftrain.checkpoints.catalog import Catalog, Record, read_catalog
from ftrain.checkpoints.errors import CheckpointError, DamagedError, LeafMismatchError, SaveError
from ftrain.checkpoints.hand_over import HandOver, WarmStart
from ftrain.checkpoints.lock import HeldElsewhereError, InUseError, hold, is_held
from ftrain.checkpoints.manager import CheckpointManager
from ftrain.checkpoints.manifest import verify
from ftrain.checkpoints.paths import (
    checkpoint_exists,
    checkpoint_state,
    checkpoints_iterator,
    latest_checkpoint,
    wait_for_checkpoint,
)
from ftrain.checkpoints.reader import (
    CheckpointReader,
    export,
    list_variables,
    load_variable,
    open_reader,
)
from ftrain.checkpoints.snapshot import digest_leaves
from ftrain.checkpoints.vocabulary import VocabInfo
from ftrain.checkpoints.warm_start import init_from_checkpoint, warm_start

__all__ = [
    "Catalog",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointReader",
    "DamagedError",
    "HandOver",
    "HeldElsewhereError",
    "InUseError",
    "LeafMismatchError",
    "Record",
    "SaveError",
    "VocabInfo",
    "WarmStart",
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
