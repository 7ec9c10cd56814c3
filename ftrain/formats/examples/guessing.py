"""Guess the features of records, and a spec to parse them.

guess = guess_schema(list(itertools.islice(read_records("train.tfrecord"), 1000)))
guess.spec  # {"image": Fixed((64,), "float32"), "label": Fixed((), "int64")}
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError

from ftrain.formats.examples.features import Entry, Fixed, Image, Ragged, Raw, Steps
from ftrain.formats.examples.images import JPEG, PNG, image_shape
from ftrain.formats.examples.messages import Example, SequenceExample

RecordKind = Literal["example", "sequence", "other"]

_KINDS = {"float_list": "float", "int64_list": "int64", "bytes_list": "bytes"}
_DTYPES = {"float": "float32", "int64": "int64", "bytes": "bytes"}
_DEFAULTS = {"float": 0.0, "int64": 0, "bytes": b""}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclasses.dataclass
class FeatureGuess:
    """Statistics of one feature, or of the steps of a feature list."""

    # "float", "int64", "bytes"; several if records differ.
    kinds: set[str] = dataclasses.field(default_factory=set)
    present: int = 0  # records, or steps, with a list of values, perhaps an empty one
    missing: int = 0  # records, or steps, without
    counts: tuple[int, int] = (0, 0)  # the smallest and largest number of values
    range: tuple[float, float] | None = None  # of finite numbers; of the lengths of bytes
    nonfinite: int = 0
    looks: set[str] = dataclasses.field(default_factory=set)  # bytes: "PNG", "JPEG", "text", "raw"
    image_shapes: set[tuple[int, int, int] | None] = dataclasses.field(default_factory=set)
    steps: tuple[int, int] | None = None  # smallest and largest number in a record

    @property
    def entry(self) -> Entry | Steps | None:
        """The entry of a spec; None if records differ in kind, or none has values."""
        if len(self.kinds) != 1:
            return None
        (kind,) = self.kinds
        fewest, most = self.counts
        if fewest != most or not most:
            return Ragged(_DTYPES[kind])
        shape = () if most == 1 else (most,)
        fixed = Fixed(shape, _DTYPES[kind], default=_DEFAULTS[kind] if self.missing else None)
        if self.steps is not None:
            return Steps(fixed, length=self.steps[1])
        content = self._content() if kind == "bytes" and most == 1 and not self.missing else None
        return content or fixed

    def _content(self) -> Entry | None:
        if self.looks and self.looks <= {"PNG", "JPEG"} and len(self.image_shapes) == 1:
            (shape,) = self.image_shapes
            return _image(shape)
        if "raw" in self.looks and self.range and self.range[0] == self.range[1]:
            return Raw((int(self.range[0]),), "uint8")
        return None

    def add(self, message: Any) -> None:
        """Add one Feature to the statistics."""
        field = message.WhichOneof("kind")
        if field is None:
            self.missing += 1
            return
        values = getattr(message, field).value
        count = len(values)
        kind = _KINDS[field]
        self.kinds.add(kind)
        fewest, most = self.counts if self.present else (count, count)
        self.counts = (min(fewest, count), max(most, count))
        self.present += 1
        if kind == "bytes":
            self._add_bytes(values)
        elif count:
            self._add_numbers(
                np.fromiter(values, np.float32 if kind == "float" else np.int64, count)
            )

    def _add_numbers(self, values: np.ndarray) -> None:
        if values.dtype == np.float32:
            finite = values[np.isfinite(values)]
            self.nonfinite += len(values) - len(finite)
            values = finite
        if len(values):
            self._widen(values.min().item(), values.max().item())

    def _add_bytes(self, values: Iterable[bytes]) -> None:
        for value in values:
            self._widen(len(value), len(value))
            look = look_of(value)
            self.looks |= {look} if look else set()
            if look in ("PNG", "JPEG"):
                self.image_shapes.add(image_shape(value))

    def _widen(self, low: float, high: float) -> None:
        lowest, highest = self.range or (low, high)
        self.range = (min(low, lowest), max(high, highest))


@dataclasses.dataclass
class SchemaGuess:
    """The features of a sample of records; for SequenceExamples those of the contexts."""

    kind: RecordKind
    records: int
    others: int  # records that are neither Examples nor SequenceExamples
    features: dict[str, FeatureGuess]
    lists: dict[str, FeatureGuess]

    @property
    def spec(self) -> dict[str, Any]:
        """The entries of all features that have one."""
        return _entries(self.features)

    @property
    def sequence_spec(self) -> dict[str, Any]:
        """The entries of all feature lists that have one."""
        return _entries(self.lists)


def guess_schema(records: Sequence[bytes]) -> SchemaGuess:
    """Guess the features of records; they are sequences if one of them has feature lists."""
    kinds = [record_kind(record) for record in records]
    known = [record for record, kind in zip(records, kinds, strict=True) if kind != "other"]
    # Empty records are valid Examples, but carry no information.
    if not any(known):
        return SchemaGuess("other", len(records), len(records), {}, {})
    guess = SchemaGuess(
        "sequence" if "sequence" in kinds else "example", len(records), kinds.count("other"), {}, {}
    )
    for number, record in enumerate(known):
        message = SequenceExample.FromString(record)
        _add(guess.features, message.context.feature, number)
        _add_lists(guess.lists, message.feature_lists.feature_list, number)
    guess.features = dict(sorted(guess.features.items()))
    guess.lists = dict(sorted(guess.lists.items()))
    return guess


def record_kind(data: bytes) -> RecordKind:
    """Return which message the bytes are.

    Nearly any message parses as an Example with unknown fields, so there must be none of those. A
    SequenceExample is an Example with one more field.
    """
    if _is_complete(Example, data):
        return "example"
    return "sequence" if _is_complete(SequenceExample, data) else "other"


def look_of(value: bytes) -> str:
    """Return what bytes look like: "PNG", "JPEG", "text" or "raw"; "" if they are empty."""
    if value.startswith(PNG):
        return "PNG"
    if value.startswith(JPEG):
        return "JPEG"
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "raw"
    if _CONTROL.search(text):
        return "raw"
    return "text" if text else ""


def _image(shape: tuple[int, int, int] | None) -> Image | None:
    try:
        return None if shape is None else Image(shape)
    except ValueError:  # more pixels than Image decodes
        return None


def _is_complete(kind: Any, data: bytes) -> bool:
    try:
        message = kind.FromString(data)
    except DecodeError:
        return False
    size = message.ByteSize()
    message.DiscardUnknownFields()
    return message.ByteSize() == size


def _entries(guesses: Mapping[str, FeatureGuess]) -> dict[str, Any]:
    return {name: guess.entry for name, guess in guesses.items() if guess.entry is not None}


def _add(guesses: dict[str, FeatureGuess], features: Mapping[str, Any], number: int) -> None:
    for name in features:
        # A feature that is new in this record was missing in all earlier ones.
        guesses.setdefault(name, FeatureGuess(missing=number)).add(features[name])
    for name in guesses.keys() - set(features):
        guesses[name].missing += 1


def _add_lists(guesses: dict[str, FeatureGuess], lists: Mapping[str, Any], number: int) -> None:
    for name in lists:
        count = len(lists[name].feature)
        guess = guesses.setdefault(name, FeatureGuess())
        earlier = guess.steps or ((0, 0) if number else (count, count))
        guess.steps = (min(earlier[0], count), max(earlier[1], count))
        for step in lists[name].feature:
            guess.add(step)
    for name in guesses.keys() - set(lists):  # a missing list has no steps
        guesses[name].steps = (0, (guesses[name].steps or (0, 0))[1])
