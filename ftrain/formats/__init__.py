"""Bytes only: how records and events lie in files."""

from ftrain.formats.records import DamagedRecordError as DamagedRecordError
from ftrain.formats.records import frame_record as frame_record
from ftrain.formats.records import read_records as read_records
