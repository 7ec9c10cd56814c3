"""Sequences: batches of SequenceExamples as arrays, by one spec for their contexts and one for their steps.

steps = {"frames": Steps(Fixed((80,), "float32"), length=100, truncate=True, lengths="frame_count")}
context, sequences = parse_sequence_examples(records, {"id": Fixed((), "int64")}, steps)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ftrain.formats.examples.columns import Column, Payloads, as_objects, join_payloads, read_column
from ftrain.formats.examples.conversions import (
    SpecError,
    Where,
    check_length,
    checked_value,
    cut,
    default_pad,
    pad_rows,
    split,
)
from ftrain.formats.examples.features import Entry, Fixed, Image, Padded, Ragged, Raw
from ftrain.formats.examples.messages import SequenceExample
from ftrain.formats.examples.parsing import check_spec, make_arrays, name_record, parse_record

_Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Steps:
    """Any number of steps, each of one shape, padded at the end: (n, length, *shape), or as long as the longest.

    `truncate` cuts what is longer, which is an error otherwise. `lengths` names an int32 array of the true numbers of
    steps. The default of `step` is for a step without values.
    """

    step: Fixed
    length: int | None = None
    pad: Any = 0
    truncate: bool = False
    lengths: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.step, Fixed):
            raise TypeError(
                f"step is {self.step!r}, wanted a Fixed; steps of varying size are Ragged, without Steps"
            )
        check_length(self.length, self.truncate)
        shape = checked_value("pad", self.filling, self.step.dtype).shape
        if shape not in ((), self.step.shape):
            raise ValueError(
                f"pad has shape {shape}, wanted a single value or the shape of a step, {self.step.shape}"
            )

    @property
    def filling(self) -> Any:
        return default_pad(self.pad, self.step.dtype)

    def outputs(self, name: str) -> list[str]:
        return [name, self.lengths] if self.lengths else [name]

    def arrays(self, name: str, values: np.ndarray, counts: np.ndarray, where: Where) -> _Arrays:
        """`values` are those of all steps, `counts` the numbers of steps in the records."""
        if self.length is not None and (long := counts > self.length).any():
            if not self.truncate:
                record = int(long.argmax())
                found = f"has {counts[record]} steps, wanted at most {self.length}"
                raise SpecError(
                    f"{where(record)}: feature list {name} {found}; Steps(truncate=True) cuts them"
                )
            values, counts = cut(values, counts, self.length)
        arrays = {name: pad_rows(values, counts, self.length, self.filling)}
        return arrays | ({self.lengths: counts.astype(np.int32)} if self.lengths else {})


def parse_sequence_examples(
    records: Sequence[bytes],
    context_spec: Mapping[str, Entry],
    sequence_spec: Mapping[str, Steps | Fixed | Ragged],
    *,
    where: Where | None = None,
) -> tuple[_Arrays, _Arrays]:
    """The wanted features of n records' contexts, and their wanted feature lists, as arrays.

    A list that a record does not have has no steps. Steps gives a padded array; Fixed is short for Steps of it, with
    its default as the pad and the numbers of steps as "NAME_length"; Ragged gives an object array of n lists, with an
    array for each step. `where(i)` names record i in errors. SpecError if a record is not what the specs say.
    """
    where = where or name_record
    lists = {name: _as_steps(name, entry) for name, entry in sequence_spec.items()}
    check_spec(context_spec, (Fixed, Padded, Ragged, Raw, Image))
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
    """The steps of all records are parsed as if they were records, and then told apart."""
    ends = np.cumsum(counts)

    def where_step(step: int) -> str:
        record = int(np.searchsorted(ends, step, side="right"))
        return f"{where(record)}: step {step - ends[record] + counts[record]}"

    values = make_arrays({name: _step_entry(entry)}, [column], where_step)[name]
    if isinstance(entry, Steps):
        return entry.arrays(name, values, counts, where)
    arrays = {name: as_objects([list(steps) for steps in split(values, counts)])}
    return arrays | ({entry.lengths: counts.astype(np.int32)} if entry.lengths else {})
