"""Summaries: numbers and strings, written to event files for TensorBoard."""

# The generated protos have no stubs.
# pyright: reportAttributeAccessIssue=false

import operator
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING

from ftrain.formats import DamagedRecordError, frame_record, read_records
from ftrain.formats.records.encoding import FRAME, MAX_RECORD_BYTES, detect_compression
from ftrain.paths import local_path

EXPECTED = "expected a number, an array of shape () or a string"


def plain_value(name: str, value: Any) -> bool | int | float | str:
    """Convert a value to a Python number or string; TypeError if it is neither."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a value must be a string, got {name!r:.60}")
    if isinstance(value, str) and not isinstance(value, np.generic):
        return value
    if isinstance(value, (bool, int, float)) and not isinstance(value, np.generic):
        return _check_size(name, value)
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise TypeError(f"{name} is {value!r:.60}, a {type(value).__name__}; {EXPECTED}")
    try:
        item = np.asarray(value).item() if shape == () else None
    except Exception as error:  # a traced value, an array that was donated
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"{name} is an array of {dtype} that cannot be read: {reason}; {EXPECTED}"
        ) from error
    if shape != () or not isinstance(item, (bool, int, float, str)):
        advice = "; write its mean, or its entries under names of their own" if shape != () else ""
        raise TypeError(
            f"{name} is an array of shape {tuple(shape)} and dtype {dtype}; {EXPECTED}{advice}"
        )
    return item


def plain_step(step: SupportsIndex) -> int:
    """Convert a step, such as an array of shape (), to an integer."""
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"a step must be a whole number, got {step!r:.60}") from None


def _check_size(name: str, value: float) -> float:
    try:
        float(value)
    except OverflowError:
        raise TypeError(
            f"{name} is a whole number of {int(value).bit_length()} bits, too large for a float"
        ) from None
    return value


class SummaryWriter:
    """Appends to a new event file in `directory`, for TensorBoard to read while it grows.

    `start_step` is the step the run starts from. TensorBoard hides later steps of an earlier,
    interrupted run, because the run takes those steps again.
    """

    def __init__(self, directory: str | Path, *, start_step: int = 0):
        directory = local_path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # Process id and nanoseconds make the name unique; TensorBoard reads files in name order.
        unique = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{time.perf_counter_ns()}"
        self.path = directory / f"events.out.tfevents.{unique}"
        self._file = open(self.path, "xb")  # noqa: SIM115 - closed by close()
        self._add(Event(file_version="brain.Event:2"))
        # TensorBoard hides events of older files from this step on; `start_step` is not repeated.
        self._add(Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write numbers and arrays of shape () as scalars, and strings as text, by name."""
        summaries = [_summary(name, plain_value(name, value)) for name, value in values.items()]
        self._add(Event(step=plain_step(step), summary=Summary(value=summaries)))
        self.flush()

    def flush(self) -> None:
        """Pass pending events to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "SummaryWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._file.write(frame_record(event.SerializeToString()))


def read_events(path: str | Path, *, max_record_bytes: int = MAX_RECORD_BYTES) -> Iterator[Event]:
    """Yield every event of a file; DamagedRecordError where a record is damaged or is not an event.

    A record of more than `max_record_bytes` (256 MiB by default) counts as damaged.
    """
    path = local_path(path)
    offset = 0
    for number, record in enumerate(read_records(path, max_record_bytes=max_record_bytes)):
        try:
            event = Event.FromString(record)
        except DecodeError:
            reason = f"its {len(record)} bytes are not an event"
            raise DamagedRecordError(
                path, number, offset, reason, uncompressed=_is_compressed(path)
            ) from None
        yield event
        offset += len(record) + FRAME


def _is_compressed(path: str | Path) -> bool:
    return detect_compression(path) is not None


def _summary(name: str, value: float | str) -> Summary.Value:
    if not isinstance(value, str):
        return Summary.Value(tag=name, simple_value=value)
    text = TensorProto(dtype=DT_STRING, string_val=[value.encode(errors="replace")])
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=name, tensor=text, metadata=SummaryMetadata(plugin_data=plugin))
