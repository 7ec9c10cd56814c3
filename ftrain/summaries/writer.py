"""Event files: scalars and texts that TensorBoard shows."""

# The generated protos have no stubs.
# pyright: reportAttributeAccessIssue=false

import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING

from ftrain.formats import DamagedRecordError, frame_record, read_records
from ftrain.formats.records.encoding import FRAME, MAX_RECORD_BYTES, detect_compression
from ftrain.paths import local_path
from ftrain.summaries.values import plain_step, plain_value


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
        """Write numbers, and arrays of shape (), as scalars and strings as texts, by name."""
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
