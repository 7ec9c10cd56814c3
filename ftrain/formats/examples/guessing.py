"""Guessing: what records hold, and the spec that would parse them.

guess = guess_schema(list(itertools.islice(read_records("train.tfrecord"), 1000)))
guess.spec  # {"image": Fixed((64,), "float32"), "label": Fixed((), "int64")}
"""

import dataclasses
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError

from ftrain.formats.examples.features import Entry, Fixed, Image, Ragged, Raw
from ftrain.formats.examples.messages import Example, SequenceExample
from ftrain.formats.examples.sequences import Steps

RecordKind = Literal["example", "sequence", "other"]

_KINDS = {"float_list": "float", "int64_list": "int64", "bytes_list": "bytes"}
_DTYPES = {"float": "float32", "int64": "int64", "bytes": "bytes"}
_DEFAULTS = {"float": 0.0, "int64": 0, "bytes": b""}
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 4, 6: 4}  # by the colour type; a palette's colours are RGB
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclasses.dataclass
class FeatureGuess:
    """What one feature, or each step of a feature list, was seen to hold."""

    kinds: set[str] = dataclasses.field(
        default_factory=set
    )  # "float", "int64", "bytes"; several if records differ
    present: int = 0  # records, or steps, that have a list of values, if an empty one
    missing: int = 0  # those that have none
    counts: tuple[int, int] = (0, 0)  # the least and the most values
    range: tuple[float, float] | None = None  # of numbers that are finite; of bytes, their lengths
    not_finite: int = 0
    looks: set[str] = dataclasses.field(default_factory=set)  # bytes: "PNG", "JPEG", "text", "raw"
    image_shapes: set[tuple[int, int, int] | None] = dataclasses.field(default_factory=set)
    steps: tuple[int, int] | None = None  # of a feature list: the least and the most in a record

    @property
    def entry(self) -> Entry | Steps | None:
        """What a spec would say of it; None if records have different kinds, or no values at all."""
        if len(self.kinds) != 1:
            return None
        (kind,) = self.kinds
        least, most = self.counts
        if least != most or not most:
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
        """Takes in one Feature."""
        field = message.WhichOneof("kind")
        if field is None:
            self.missing += 1
            return
        values = getattr(message, field).value
        count, kind = len(values), _KINDS[field]
        self.kinds.add(kind)
        self.counts = (
            (min(self.counts[0], count), max(self.counts[1], count))
            if self.present
            else (count, count)
        )
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
            self.not_finite += len(values) - len(finite)
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
        self.range = (
            (low, high)
            if self.range is None
            else (min(low, self.range[0]), max(high, self.range[1]))
        )


@dataclasses.dataclass
class SchemaGuess:
    """What a sample of records holds; `features` of SequenceExamples are those of their contexts."""

    kind: RecordKind
    records: int
    others: int  # records of the sample that are neither Examples nor SequenceExamples
    features: dict[str, FeatureGuess]
    lists: dict[str, FeatureGuess]

    @property
    def spec(self) -> dict[str, Any]:
        """The entries of all features that have one."""
        return _entries(self.features)

    @property
    def sequence_spec(self) -> dict[str, Any]:
        """The same of feature lists."""
        return _entries(self.lists)


def guess_schema(records: Sequence[bytes]) -> SchemaGuess:
    """What records hold: examples if they are such, sequences if one of them has feature lists."""
    kinds = [record_kind(record) for record in records]
    known = [record for record, kind in zip(records, kinds, strict=True) if kind != "other"]
    # Records of no bytes are Examples in theory, but tell nothing.
    if not any(known):
        return SchemaGuess("other", len(records), len(records), {}, {})
    guess = SchemaGuess(
        "sequence" if "sequence" in kinds else "example", len(records), kinds.count("other"), {}, {}
    )
    for number, record in enumerate(known):
        message = SequenceExample.FromString(record)
        _add(guess.features, message.context.feature, number)
        _add_lists(guess.lists, message.feature_lists.feature_list, number)
    guess.features, guess.lists = (
        dict(sorted(guess.features.items())),
        dict(sorted(guess.lists.items())),
    )
    return guess


def record_kind(data: bytes) -> RecordKind:
    """Which message the bytes are.

    Nearly any message parses as an Example, with fields that an Example does not have: so there must be none of those.
    A SequenceExample is an Example with a field more.
    """
    if _is_whole(Example, data):
        return "example"
    return "sequence" if _is_whole(SequenceExample, data) else "other"


def look_of(value: bytes) -> str:
    """What bytes look like: "PNG", "JPEG", "text" or "raw"; "" for no bytes, which look like anything."""
    if value.startswith(_PNG):
        return "PNG"
    if value.startswith(_JPEG):
        return "JPEG"
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "raw"
    if _NO_TEXT.search(text):
        return "raw"
    return "text" if text else ""


def image_shape(data: bytes) -> tuple[int, int, int] | None:
    """Height, width and channels as the head of a PNG or JPEG file has them; None if it does not."""
    if data.startswith(_PNG):
        if len(data) < 26:
            return None
        width, height, _, colours = struct.unpack_from(">IIBB", data, 16)
        shape = height, width, _PNG_CHANNELS.get(colours, 0)
    else:
        shape = next(_jpeg_frames(data), (0, 0, 0))
    return shape if all(shape) else None


def _image(shape: tuple[int, int, int] | None) -> Image | None:
    try:
        return None if shape is None else Image(shape)
    except ValueError:  # more pixels than are decoded
        return None


def _is_whole(kind: Any, data: bytes) -> bool:
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
        # A feature that is new in this record was missing in all those before it.
        guesses.setdefault(name, FeatureGuess(missing=number)).add(features[name])
    for name in guesses.keys() - set(features):
        guesses[name].missing += 1


def _add_lists(guesses: dict[str, FeatureGuess], lists: Mapping[str, Any], number: int) -> None:
    for name in lists:
        count = len(lists[name].feature)
        guess = guesses.setdefault(name, FeatureGuess())
        earlier = guess.steps or ((0, 0) if number else (count, count))
        guess.steps = min(earlier[0], count), max(earlier[1], count)
        for step in lists[name].feature:
            guess.add(step)
    for name in guesses.keys() - set(lists):  # a list that is not there has no steps
        guesses[name].steps = 0, (guesses[name].steps or (0, 0))[1]


def _jpeg_frames(data: bytes) -> Iterator[tuple[int, int, int]]:
    """The shapes in the frame headers of a JPEG file, of which a picture has one."""
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = struct.unpack_from(">BH", data, at + 1)
        # 0xC4, 0xC8 and 0xCC lie among the markers of frames, and are tables.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width, components = struct.unpack_from(">HHB", data, at + 5)
            yield height, width, 1 if components == 1 else 3
        at += 2 + length
