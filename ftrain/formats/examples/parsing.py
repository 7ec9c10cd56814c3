"""Parsing: batches of Examples and SequenceExamples as arrays, by a spec of their features.

spec = {"x": Fixed((64,), "float32"), "label": Fixed((), "int64"), "name": Fixed((), "bytes")}
arrays = parse_examples(list(read_records("train.tfrecord")), spec)  # {"x": (n, 64), ...}
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ftrain.formats.examples.columns import (
    ABSENT,
    KIND_NAMES,
    PADDING,
    Column,
    NotCanonicalError,
    Payloads,
    Spans,
    as_objects,
    join_payloads,
    read_column,
    split,
)
from ftrain.formats.examples.features import (
    Entry,
    Fixed,
    Image,
    MissingFeatureError,
    Padded,
    Ragged,
    Raw,
    SpecError,
    Steps,
    Where,
)
from ftrain.formats.examples.lockstep import Walker
from ftrain.formats.examples.messages import Example, SequenceExample, parse_message

_Arrays = dict[str, np.ndarray]

_FEW_RECORDS = 16  # up to 16 records, protobuf is faster than lock-step
_ENTRIES = (Fixed, Padded, Ragged, Raw, Image)


def parse_examples(
    records: Sequence[bytes], spec: Mapping[str, Entry], *, where: Where | None = None
) -> dict[str, np.ndarray]:
    """Return the features of n records as arrays; features that are not in the spec are ignored.

    `where(i)` names record i in errors. SpecError if a record does not match the spec.
    """
    return ExampleParser(spec)(records, where)


class ExampleParser:
    """`parse_examples` with one spec for many batches; caches the layouts of earlier records."""

    def __init__(self, spec: Mapping[str, Entry]):
        self.spec = dict(spec)
        check_spec(self.spec, _ENTRIES)
        self._walker = Walker(list(self.spec))

    def __call__(
        self, records: Sequence[bytes], where: Where | None = None
    ) -> dict[str, np.ndarray]:
        where = where or name_record
        columns = self._walk_columns(records) if len(records) >= _FEW_RECORDS else None
        if columns is None:
            columns = self._parse_columns(records, where)
        try:
            return make_arrays(self.spec, columns, where)
        except MissingFeatureError as error:
            present = parse_message(Example, records[error.record]).features.feature
            raise error.with_present(list(present)) from None

    def _walk_columns(self, records: Sequence[bytes]) -> list[Column] | None:
        """Return the columns of all records; None if one is damaged, for protobuf to report."""
        data = b"".join([*records, PADDING])
        lengths = np.fromiter(map(len, records), np.int64, len(records))
        ends = lengths.cumsum()
        try:
            found, irregular = self._walker.walk(data, ends - lengths, ends)
            if np.count_nonzero(irregular):
                extra, data = self._parse(
                    records, np.flatnonzero(irregular).tolist(), name_record, data
                )
                for spans, more in zip(found, extra, strict=True):
                    spans.put(irregular, more)
            return self._read(data, found)
        except (NotCanonicalError, SpecError):
            return None

    def _parse_columns(self, records: Sequence[bytes], where: Where) -> list[Column]:
        found, data = self._parse(records, range(len(records)), where, b"")
        return self._read(data, found)

    def _parse(
        self, records: Sequence[bytes], numbers: Iterable[int], where: Where, data: bytes
    ) -> tuple[list[Spans], bytes]:
        """Return spans of the records with these numbers, and `data` followed by their payloads."""
        payloads = [Payloads() for _ in self.spec]
        for number in numbers:
            features = parse_record(Example, records[number], number, where).features.feature
            for name, payload in zip(self.spec, payloads, strict=True):
                payload.add(features.get(name))
        return join_payloads(payloads, data)

    def _read(self, data: bytes, found: Sequence[Spans]) -> list[Column]:
        return [
            read_column(data, spans, entry.kind)
            for spans, entry in zip(found, self.spec.values(), strict=True)
        ]


def check_spec(spec: Mapping[str, Any], entries: tuple[type, ...]) -> None:
    """Raise TypeError for anything but `entries`, ValueError if two arrays would share a name."""
    names: set[str] = set()
    for name, entry in spec.items():
        if not isinstance(name, str):
            raise TypeError(f"names of features must be strings, got {name!r}")
        if not isinstance(entry, entries):
            expected = ", ".join(kind.__name__ for kind in entries)
            raise TypeError(
                f"the spec of feature {name!r} is {entry!r}, expected one of {expected}"
            )
        for output in entry.outputs(name):
            if output in names or (output != name and output in spec):
                raise ValueError(
                    f"two arrays would be named {output!r}; "
                    f"choose another lengths='...' for feature {name!r}"
                )
            names.add(output)


def name_record(number: int) -> str:
    """Return the name of a record in errors."""
    return f"record {number}"


def parse_record(kind: Any, data: bytes, number: int, where: Where) -> Any:
    """Parse a message and drop unknown fields; SpecError if the bytes are not a message."""
    try:
        message = parse_message(kind, data)
    except ValueError as error:
        raise SpecError(f"{where(number)}: {error}; it may be another kind of record") from None
    message.DiscardUnknownFields()
    return message


def make_arrays(
    spec: Mapping[str, Any], columns: Sequence[Column], where: Where
) -> dict[str, np.ndarray]:
    """Return the arrays of all columns."""
    arrays = {}
    for (name, entry), column in zip(spec.items(), columns, strict=True):
        _check_kinds(name, column, entry.kind, where)
        arrays |= entry.arrays(name, column, where)
    return arrays


def _check_kinds(name: str, column: Column, kind: int, where: Where) -> None:
    """Raise SpecError if a record has a different kind of list than the spec, even an empty one."""
    if np.count_nonzero(column.kinds == kind) == len(column.kinds):
        return
    wrong = (column.kinds != kind) & (column.kinds != ABSENT)
    if wrong.any():
        record = int(wrong.argmax())
        found = KIND_NAMES[int(column.kinds[record])]
        raise SpecError(
            f"{where(record)}: feature {name} has {found}, expected {KIND_NAMES[kind]}; "
            f"use a dtype of {found} in the spec"
        )


def parse_sequence_examples(
    records: Sequence[bytes],
    context_spec: Mapping[str, Entry],
    sequence_spec: Mapping[str, Steps | Fixed | Ragged],
    *,
    where: Where | None = None,
) -> tuple[_Arrays, _Arrays]:
    """Return the context features and the feature lists of n SequenceExamples as arrays.

    steps = {"frames": Steps(Fixed((80,), "float32"), length=100, lengths="frame_count")}
    context, sequences = parse_sequence_examples(records, {"id": Fixed((), "int64")}, steps)

    A missing list has no steps. Steps makes a padded array. Fixed is short for Steps of it, with
    its default as the pad and the numbers of steps as "NAME_length". Ragged makes an object array
    of n lists, with an array for each step. `where(i)` names record i in errors. SpecError if a
    record does not match the specs.
    """
    where = where or name_record
    lists = {name: _as_steps(name, entry) for name, entry in sequence_spec.items()}
    check_spec(context_spec, _ENTRIES)
    check_spec(lists, (Steps, Ragged))
    contexts = {name: Payloads() for name in context_spec}
    steps = {name: Payloads() for name in lists}
    counts = np.zeros((len(lists), len(records)), np.int64)
    for number, data in enumerate(records):
        message = parse_record(SequenceExample, data, number, where)
        for name, payloads in contexts.items():
            payloads.add(message.context.feature.get(name))
        for row, (name, payloads) in enumerate(steps.items()):
            features = message.feature_lists.feature_list
            found = features[name].feature if name in features else ()
            counts[row, number] = len(found)
            for feature in found:
                payloads.add(feature)
    context = make_arrays(context_spec, _columns(contexts, context_spec), where)
    columns = _columns(steps, {name: _step_entry(entry) for name, entry in lists.items()})
    sequences: _Arrays = {}
    for (name, entry), column, count in zip(lists.items(), columns, counts, strict=True):
        sequences |= _list_arrays(name, entry, column, count, where)
    return context, sequences


def _as_steps(name: str, entry: Any) -> Any:
    if not isinstance(entry, Fixed):
        return entry
    return Steps(entry, pad=0 if entry.default is None else entry.default, lengths=f"{name}_length")


def _step_entry(entry: Steps | Ragged) -> Fixed | Ragged:
    return entry.step if isinstance(entry, Steps) else Ragged(entry.dtype)


def _columns(payloads: Mapping[str, Payloads], spec: Mapping[str, Any]) -> list[Column]:
    spans, data = join_payloads(list(payloads.values()), b"")
    return [
        read_column(data, part, entry.kind)
        for part, entry in zip(spans, spec.values(), strict=True)
    ]


def _list_arrays(
    name: str, entry: Steps | Ragged, column: Column, counts: np.ndarray, where: Where
) -> _Arrays:
    """Convert the steps of all records as if they were records, then split them by record."""
    ends = np.cumsum(counts)

    def where_step(step: int) -> str:
        record = int(np.searchsorted(ends, step, side="right"))
        return f"{where(record)}: step {step - ends[record] + counts[record]}"

    values = make_arrays({name: _step_entry(entry)}, [column], where_step)[name]
    if isinstance(entry, Steps):
        return entry.arrays(name, values, counts, where)
    arrays = {name: as_objects([list(steps) for steps in split(values, counts)])}
    return arrays | ({entry.lengths: counts.astype(np.int32)} if entry.lengths else {})
