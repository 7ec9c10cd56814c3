"""Columns: the values of one feature in many records, located in their bytes and decoded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from ftrain.formats.examples.messages import BytesList

# The kind of list of a feature. The first four are the field numbers in the message.
ABSENT, BYTES, FLOAT, INT64 = range(4)
BYTES_MESSAGE = 4  # bytes, but the span covers the whole list and not its only value
EMPTY = 5  # the feature is present, without any list
KIND_NAMES = {ABSENT: "nothing", BYTES: "bytes", FLOAT: "floats", INT64: "integers"}
PADDING = bytes(512)  # after the last record, so that windows that start inside it fit

_SHORT = 64  # bytes; shorter values are copied as a table
_SPARSE = 32  # mean length; above it, slicing is faster than an index of every byte
_LONGEST_VARINT = 10
_WORDS = (np.dtype("<u4"), np.dtype("<u8"))
_FLAGS = (0x80808080, 0x8080808080808080)  # "more bytes follow", in each byte of a word
# By the size of a varint: a mask of its bytes, and its flags, set in every byte but the last.
_BELOW = [
    np.array([(1 << 8 * size) - 1 for size in range(word.itemsize + 1)], word) for word in _WORDS
]
_MORE = [
    below[[0, *range(len(below) - 1)]] & flags for below, flags in zip(_BELOW, _FLAGS, strict=True)
]


class NotCanonicalError(ValueError):
    """Bytes that are not canonical, so protobuf must parse them."""


class Spans(NamedTuple):
    """For every record: the kind of list of a feature, and the bytes that hold its values."""

    kinds: np.ndarray  # uint8
    starts: np.ndarray  # int64, of the payloads
    lengths: np.ndarray  # int64, in bytes

    @classmethod
    def absent(cls, count: int) -> "Spans":
        """Return spans of records without the feature."""
        return cls(np.zeros(count, np.uint8), np.zeros(count, np.int64), np.zeros(count, np.int64))

    def put(self, records: np.ndarray, others: "Spans") -> None:
        """Replace the spans of the given records."""
        for array, values in zip(self, others, strict=True):
            array[records] = values


class Column(NamedTuple):
    """The values of one feature in all records, concatenated."""

    kinds: np.ndarray  # uint8, ABSENT to INT64
    values: np.ndarray  # flat: float32, int64, or objects of bytes
    counts: np.ndarray  # int64, the number of values of each record


class Payloads:
    """Collects the payloads of one feature from parsed messages."""

    def __init__(self):
        self.parts: list[bytes] = []
        self._rows: list[tuple[int, int]] = []  # kinds and lengths

    def add(self, feature: Any) -> None:
        """Append a feature without unknown fields; None if it is absent."""
        field = None if feature is None else feature.WhichOneof("kind")
        if field is None:
            self._rows.append((ABSENT, 0))
            return
        body = getattr(feature, field).SerializeToString()
        if field == "bytes_list":
            kind = BYTES_MESSAGE
        else:
            kind = FLOAT if field == "float_list" else INT64
            body = _strip_header(body)
        self._rows.append((kind, len(body)))
        self.parts.append(body)

    def spans(self, start: int) -> Spans:
        """Return the spans of the payloads if the first is at `start`."""
        kinds, lengths = np.array(self._rows, np.int64).reshape(-1, 2).T
        return Spans(kinds.astype(np.uint8), start + lengths.cumsum() - lengths, lengths)


def join_payloads(payloads: Sequence[Payloads], data: bytes) -> tuple[list[Spans], bytes]:
    """Return the spans of each, and `data` followed by all payloads and PADDING."""
    spans = []
    parts = [data]
    end = len(data)
    for payload in payloads:
        spans.append(payload.spans(end))
        parts += payload.parts
        end += sum(map(len, payload.parts))
    return spans, b"".join([*parts, PADDING])


def read_column(data: bytes, spans: Spans, kind: int) -> Column:
    """Decode the values of records that have `kind`; others are checked, but count no values.

    `data` must end with PADDING. NotCanonicalError if a payload does not fit its kind.
    """
    kinds, starts, lengths = spans
    if np.count_nonzero(kinds == kind) < len(kinds):
        other = (kinds != kind) & (kinds != (BYTES_MESSAGE if kind == BYTES else kind))
        check_spans(data, Spans(kinds[other], starts[other], lengths[other]))
        lengths = np.where(other, 0, lengths)
        listed = kinds == BYTES_MESSAGE
        kinds = np.where(listed, BYTES, np.where(kinds == EMPTY, ABSENT, kinds)).astype(np.uint8)
        if kind == BYTES:
            return Column(kinds, *_read_bytes(data, starts, lengths, kinds == BYTES, listed))
    if kind == FLOAT:
        return Column(kinds, gather(data, starts, lengths).view("<f4"), lengths >> 2)
    if kind == INT64:
        return Column(kinds, *_read_integers(data, starts, lengths))
    return Column(kinds, slice_objects(data, starts, lengths), np.ones(len(kinds), np.int64))


def check_spans(data: bytes, spans: Spans) -> None:
    """Raise NotCanonicalError unless every payload fits its kind, as bytes and floats always do."""
    for kind, read in ((INT64, _read_integers), (BYTES_MESSAGE, _read_lists)):
        chosen = spans.kinds == kind
        if chosen.any():
            read(data, spans.starts[chosen], spans.lengths[chosen])


def cut(values: np.ndarray, counts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `length` values of each record, and their counts."""
    starts = np.cumsum(counts) - counts
    places = np.arange(len(values)) - np.repeat(starts, counts)
    return values[places < length], np.minimum(counts, length)


def pad_rows(values: np.ndarray, counts: np.ndarray, length: int | None, pad: Any) -> np.ndarray:
    """Return an array (n, length, ...) from concatenated values, `counts` of them per row."""
    length = largest(counts) if length is None else length
    if (counts == length).all():
        return values.reshape(len(counts), length, *values.shape[1:])
    rows = np.empty((len(counts), length, *values.shape[1:]), values.dtype)
    if np.ndim(pad):
        rows[...] = pad
    else:
        rows.fill(pad)  # np.full would drop trailing zero bytes
    rows[np.arange(length) < counts[:, None]] = values
    return rows


def split(values: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Return the values of each record."""
    ends = np.cumsum(counts)
    return [
        values[start:end]
        for start, end in zip((ends - counts).tolist(), ends.tolist(), strict=True)
    ]


def gather(data: bytes | bytearray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the bytes of all spans, concatenated, as a new array."""
    if not len(starts):
        return np.empty(0, np.uint8)
    width = int(lengths[0])
    if np.count_nonzero(lengths == width) == len(lengths):
        return windows(data, width)[starts].view(np.uint8) if width else np.empty(0, np.uint8)
    ends = lengths.cumsum()
    total = int(ends[-1])
    if total <= _SPARSE * len(starts):
        places = np.repeat(starts - ends + lengths, lengths)
        places += np.arange(total)
        return np.frombuffer(data, np.uint8)[places]
    view = memoryview(data)
    pieces = [
        view[start:end]
        for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    ]
    return np.frombuffer(bytearray().join(pieces), np.uint8)


def windows(data: bytes | bytearray, width: int) -> np.ndarray:
    """Return a view of every `width` adjacent bytes as void items, which copy fast."""
    return np.ndarray((len(data) - width + 1,), np.dtype((np.void, width)), data, strides=(1,))


def slice_objects(data: bytes, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return each span as a bytes object, in an object array."""
    count = len(starts)
    width = largest(lengths)
    ends = starts + lengths
    if 0 < width <= _SHORT:
        table = windows(data, width)[starts].view(np.uint8).reshape(count, width)
        table *= np.arange(width, dtype=np.uint8) < lengths.astype(np.uint8)[:, None]
        values = table.view(f"S{width}").reshape(count).astype(object)
        for number in np.flatnonzero(np.frombuffer(data, np.uint8)[ends - 1] == 0).tolist():
            values[number] = data[starts[number] : ends[number]]  # numpy drops trailing zeros
        return values
    return as_objects(
        [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    )


def largest(values: np.ndarray) -> int:
    """Return the maximum of non-negative values, 0 if there are none."""
    return int(values.max()) if len(values) else 0  # max(initial=0) is many times slower


def as_objects(values: Sequence[Any]) -> np.ndarray:
    """Return a one-dimensional object array of the values."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _strip_header(body: bytes) -> bytes:
    """Return the payload of a message of one packed field, after tag and varint."""
    place = 1
    while place < len(body) and body[place] >= 128:
        place += 1
    return body[place + 1 :]


def _read_bytes(
    data: bytes, starts: np.ndarray, lengths: np.ndarray, present: np.ndarray, listed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return values and counts where records have one value, a list of them, or none."""
    counts = present.astype(np.int64)
    if not listed.any():
        return slice_objects(data, starts[present], lengths[present]), counts
    values = []
    rows = zip(
        starts.tolist(), (starts + lengths).tolist(), present.tolist(), listed.tolist(), strict=True
    )
    for number, (start, end, is_present, is_listed) in enumerate(rows):
        if is_listed:
            several = _parse_list(data[start:end])
            counts[number] = len(several)
            values.extend(several)
        elif is_present:
            values.append(data[start:end])
    return as_objects(values), counts


def _read_lists(data: bytes, starts: np.ndarray, lengths: np.ndarray) -> None:
    for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True):
        _parse_list(data[start:end])


def _parse_list(body: bytes) -> list[bytes]:
    try:
        return list(BytesList.FromString(body).value)
    except DecodeError:
        raise NotCanonicalError("a list of bytes is damaged") from None


def _read_integers(
    data: bytes, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Decode packed varints; return values and counts."""
    longest = largest(lengths)
    if longest <= 8 and np.count_nonzero(lengths) == len(lengths):  # perhaps one value each
        words, kind = _read_words(data, starts, lengths, longest)
        if np.count_nonzero((words & _FLAGS[kind]) == _MORE[kind][lengths]) == len(words):
            return _squeeze(words, longest), np.ones(len(starts), np.int64)
    packed = gather(data, starts, lengths)
    last = np.flatnonzero(packed < 128)  # where each value ends
    bounds = lengths.cumsum()
    if (packed[bounds[lengths > 0] - 1] >= 128).any():
        raise NotCanonicalError("a list of integers is cut short")
    sizes = last + 1
    sizes[1:] -= sizes[:-1].copy()
    if largest(sizes) > _LONGEST_VARINT:
        raise NotCanonicalError("an integer has too many bytes")
    counts = np.diff(np.searchsorted(last, bounds), prepend=0)
    return _decode_varints(packed, last - sizes + 1, sizes), counts


def _decode_varints(packed: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    longest = largest(sizes)
    if longest <= 1:
        return packed.astype(np.int64)
    words, _ = _read_words(
        packed.tobytes() + PADDING[:8], starts, np.minimum(sizes, 8), min(longest, 8)
    )
    values = _squeeze(words, min(longest, 8))
    for place in range(8, longest):  # byte ten holds a single bit, the sign
        chosen = np.flatnonzero(sizes > place)
        values[chosen] |= (
            (packed[starts[chosen] + place] & 127).astype(np.uint64) << (7 * place)
        ).view(np.int64)
    return values


def _read_words(
    data: bytes, starts: np.ndarray, sizes: np.ndarray, longest: int
) -> tuple[np.ndarray, int]:
    """Return varints of up to 4 or 8 bytes as masked words, and the index of the word type."""
    kind = 0 if longest <= 4 else 1
    word = _WORDS[kind]
    return windows(data, word.itemsize)[starts].view(word) & _BELOW[kind][sizes], kind


def _squeeze(words: np.ndarray, size: int) -> np.ndarray:
    """Join the low seven bits of each byte."""
    values = words & 0x7F
    for place in range(1, size):
        values |= (words >> place) & (0x7F << 7 * place)
    return values.astype(np.int64)
