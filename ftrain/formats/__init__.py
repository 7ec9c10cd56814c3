"""Bytes only: how records and events lie in files."""

from ftrain.formats.records import DamagedRecordError, frame_record, read_records

__all__ = [
    "DamagedRecordError",
    "frame_record",
    "read_records",
]
