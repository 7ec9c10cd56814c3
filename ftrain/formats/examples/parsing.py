"""Parsing: batches of Examples as arrays, by a spec of the features that are wanted.

spec = {"x": Fixed((64,), "float32"), "label": Fixed((), "int64"), "name": Fixed((), "bytes")}
arrays = parse_examples(list(read_records("train.tfrecord")), spec)  # {"x": (n, 64), "label": (n,), ...}
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ftrain.formats.examples.columns import (
    PADDING,
    Column,
    Payloads,
    Spans,
    UnusualError,
    join_payloads,
    read_column,
)
from ftrain.formats.examples.conversions import MissingFeatureError, SpecError, Where
from ftrain.formats.examples.features import Entry, Fixed, Image, Padded, Ragged, Raw, check_kinds
from ftrain.formats.examples.lockstep import Walker
from ftrain.formats.examples.messages import Example, parse_message

_FEW = 16  # records that are parsed one by one, since starting a walk would take longer
_ENTRIES = (Fixed, Padded, Ragged, Raw, Image)


def parse_examples(
    records: Sequence[bytes], spec: Mapping[str, Entry], *, where: Where | None = None
) -> dict[str, np.ndarray]:
    """The wanted features of n records as arrays; whatever else is in the records is passed over.

    `where(i)` names record i in errors. SpecError if a record is no Example or not what the spec says.
    """
    return ExampleParser(spec)(records, where)


class ExampleParser:
    """`parse_examples` with one spec, for many batches: it remembers how the records of earlier ones were laid out."""

    def __init__(self, spec: Mapping[str, Entry]):
        self.spec = dict(spec)
        check_spec(self.spec, _ENTRIES)
        self._walker = Walker(list(self.spec))

    def __call__(
        self, records: Sequence[bytes], where: Where | None = None
    ) -> dict[str, np.ndarray]:
        where = where or name_record
        columns = self._columns_together(records) if len(records) >= _FEW else None
        if columns is None:
            columns = self._columns_singly(records, where)
        try:
            return make_arrays(self.spec, columns, where)
        except MissingFeatureError as error:
            there = parse_message(Example, records[error.record]).features.feature
            raise error.told_with(list(there)) from None

    def _columns_together(self, records: Sequence[bytes]) -> list[Column] | None:
        """The columns of all records; None if one of them is damaged, which the parser has to tell."""
        data = b"".join([*records, PADDING])
        lengths = np.fromiter(map(len, records), np.int64, len(records))
        ends = lengths.cumsum()
        try:
            found, odd = self._walker.walk(data, ends - lengths, ends)
            if np.count_nonzero(odd):
                extra, data = self._parse(records, np.flatnonzero(odd).tolist(), name_record, data)
                for spans, more in zip(found, extra, strict=True):
                    spans.put(odd, more)
            return self._read(data, found)
        except (UnusualError, SpecError):
            return None

    def _columns_singly(self, records: Sequence[bytes], where: Where) -> list[Column]:
        found, data = self._parse(records, range(len(records)), where, b"")
        return self._read(data, found)

    def _parse(
        self, records: Sequence[bytes], numbers: Iterable[int], where: Where, data: bytes
    ) -> tuple[list[Spans], bytes]:
        """Spans of the records with these numbers, and `data` with their payloads behind it."""
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
    """TypeError for anything but `entries`; ValueError if two arrays would have one name."""
    names: set[str] = set()
    for name, entry in spec.items():
        if not isinstance(name, str) or not isinstance(entry, entries):
            wanted = ", ".join(kind.__name__ for kind in entries)
            raise TypeError(
                f"the spec of feature {name!r} is {entry!r}, wanted a str and one of {wanted}"
            )
        for output in entry.outputs(name):
            if output in names or (output != name and output in spec):
                raise ValueError(
                    f"two arrays would be named {output!r}; give feature {name!r} another lengths='...'"
                )
            names.add(output)


def name_record(number: int) -> str:
    return f"record {number}"


def parse_record(kind: Any, data: bytes, number: int, where: Where) -> Any:
    """A message without unknown fields; SpecError if the bytes are none."""
    try:
        message = parse_message(kind, data)
    except ValueError as error:
        raise SpecError(
            f"{where(number)}: {error}; was it written as another kind of record?"
        ) from None
    message.DiscardUnknownFields()
    return message


def make_arrays(
    spec: Mapping[str, Any], columns: Sequence[Column], where: Where
) -> dict[str, np.ndarray]:
    arrays = {}
    for (name, entry), column in zip(spec.items(), columns, strict=True):
        check_kinds(name, column, entry.kind, where)
        arrays |= entry.arrays(name, column, where)
    return arrays
