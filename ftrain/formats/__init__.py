"""Bytes only: how records and events lie in files."""

from ftrain.formats.records import DamagedRecordError, frame_record, read_records
from ftrain.formats.tf_checkpoint import (
    TfCheckpoint,
    TfCheckpointError,
    TfCheckpointState,
    TfVariable,
    format_state,
    is_tf_checkpoint,
    latest_tf_checkpoint,
    parse_state,
)

__all__ = [
    "DamagedRecordError",
    "TfCheckpoint",
    "TfCheckpointError",
    "TfCheckpointState",
    "TfVariable",
    "format_state",
    "frame_record",
    "is_tf_checkpoint",
    "latest_tf_checkpoint",
    "parse_state",
    "read_records",
]
