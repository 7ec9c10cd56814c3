"""Lock-step: find the features of many Examples together, one entry of every record at a time.

On the wire an entry of an Example is `0A entry-length 0A key-length key 12 feature-length kind
list-length 0A payload-length payload`. A layout is the pattern of these bytes for a given key, kind
and sizes of the four varints: all bytes before the payload are known except the varints, and those
must agree, because all of them end where the payload ends. A layout is compared with many records
at once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ftrain.formats.examples.columns import (
    ABSENT,
    BYTES,
    BYTES_MESSAGE,
    EMPTY,
    FLOAT,
    INT64,
    Spans,
    check_spans,
    windows,
)

_FEW_RECORDS = 8  # fewer records are not worth another layout
_MAX_LAYOUTS = 8  # cached layouts per step, tried before a record is inspected
_MAX_STEPS = 256  # entries in a record
_HEADER = -1  # the step before the first entry

# Tags.
_ENTRY = 0x0A
_KEY = 0x0A
_VALUE = 0x12
_ITEM = 0x0A
_KINDS = {0x0A: BYTES, 0x12: FLOAT, 0x1A: INT64}
_LONGEST_LENGTH = 4  # bytes of a length's varint; above 256 MB protobuf parses the record
_LONGEST_KEY = 256
_WORD = 8
_MAX_KNOWN = 64  # cached rows of a layout
_UNKNOWN: Any = object()  # not None, which means that a row does not fit


class Match(NamedTuple):
    """The records that a layout fits, as a mask (None: all), and the spans of their payloads."""

    fits: np.ndarray | None
    starts: np.ndarray
    lengths: np.ndarray


class Layout:
    """A pattern from `head`, the bytes of one record, with `varints` (place, size) left open."""

    def __init__(self, head: bytes, varints: tuple[tuple[int, int], ...], key: bytes, kind: int):
        self.key = key
        self.kind = kind
        self._size = len(head)
        self._varints = varints
        self._width = -(-len(head) // _WORD) * _WORD
        self._is_narrow = all(size == 1 for _, size in varints)
        mask = bytearray(b"\xff" * len(head))
        for place, size in varints:
            # Compare the size of the varint, not its value.
            mask[place : place + size] = b"\x80" * size
        self._masks = _as_words(bytes(mask), self._width)
        self._pattern = _as_words(head, self._width) & self._masks
        self._last_word = int.from_bytes(b"\xff" * (_WORD - self._width + self._size), "little")
        # Payload lengths by row, from batches in which all rows were equal.
        self._known: dict[bytes, int | None] = {}

    def match(self, data: bytes, places: np.ndarray) -> Match | None:
        """Match the entries that start at `places`; None if none has this layout."""
        rows = windows(data, self._width)[places]
        # Transposed, because long rows are compared faster.
        columns = rows.view(np.uint64).reshape(len(places), -1).T.copy()
        columns[-1] &= self._last_word  # drop the bytes after the head
        if _all(columns == columns[:, :1]):  # values of one size in all records
            length = self._single_length(columns[:, 0].copy())
            if length is None:
                return None
            return Match(None, places + self._size, np.full(len(places), length))
        equal = (columns & self._masks) == self._pattern
        fits = None
        if not _all(equal):
            fits = np.logical_and.reduce(equal, axis=0)
            if not np.count_nonzero(fits):
                return None
            rows = rows[fits]
            places = places[fits]
        lengths, agree = self._lengths(rows.view(np.uint8).reshape(len(rows), -1))
        return _narrow(fits, agree, places + self._size, lengths)

    def _lengths(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the payload lengths, and a mask of rows whose lengths agree (None: all)."""
        if not self._varints:
            return np.zeros(len(table), np.int64), None
        # Single bytes are compared as uint8: below 128 their differences cannot wrap to a match.
        *outer, lengths = (
            _decode(table, place, size, self._is_narrow) for place, size in self._varints
        )
        agree = (lengths & 3) == 0 if self.kind == FLOAT else None
        for (place, size), values in zip(self._varints[:-1], outer, strict=True):
            equal = values - (self._size - place - size) == lengths
            agree = equal if agree is None else agree & equal
        return lengths.astype(np.int64), None if agree is None or _all(agree) else agree

    def _single_length(self, words: np.ndarray) -> int | None:
        """Return the payload length of one row; None if it does not fit."""
        row = words.tobytes()
        known = self._known.get(row, _UNKNOWN)
        if known is _UNKNOWN:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            lengths, agree = self._lengths(words.view(np.uint8).reshape(1, -1))
            fits = _all((words & self._masks[:, 0]) == self._pattern[:, 0]) and agree is None
            known = self._known[row] = int(lengths[0]) if fits else None
        return known


def find_layout(data: bytes, start: int, end: int) -> Layout | None:
    """Return the layout of the entry at `start`; None if it is not canonical or exceeds `end`."""
    reader = _Reader(data, start, end)
    inner = reader.enter(_ENTRY) and reader.enter(_KEY, is_length=False)
    if not inner or reader.length > _LONGEST_KEY:
        return None
    key = reader.take(reader.length)
    if not _is_text(key) or not reader.enter(_VALUE):
        return None
    if reader.at_end():
        return reader.layout(key, EMPTY, fixed=True)
    kind = _KINDS.get(reader.peek())
    if kind is None or not reader.enter(reader.peek()):
        return None
    if reader.at_end():
        return reader.layout(key, BYTES_MESSAGE if kind == BYTES else kind, fixed=True)
    outer = reader.copy()
    if reader.enter(_ITEM) and not (kind == FLOAT and reader.length % 4):
        return reader.layout(key, kind)
    return outer.layout(key, BYTES_MESSAGE) if kind == BYTES else None


def find_header(data: bytes, start: int, end: int) -> Layout | None:
    """Return the layout of the bytes before the first entry: one field that holds the record."""
    reader = _Reader(data, start, end)
    is_whole = reader.enter(_ENTRY) and reader.place + reader.length == end
    return reader.layout(b"", EMPTY) if is_whole else None


class _Reader:
    """Enters nested fields, all of which must end at the same place."""

    def __init__(self, data: bytes, start: int, end: int):
        self._data = data
        self._start = start
        self._limit = end
        self.place = start
        self.length = 0
        self._end: int | None = None  # where all fields end, once the first was entered
        self._varints: list[tuple[int, int]] = []

    def copy(self) -> "_Reader":
        twin = _Reader(self._data, self._start, self._limit)
        twin.place = self.place
        twin.length = self.length
        twin._end = self._end
        twin._varints = [*self._varints]
        return twin

    def peek(self) -> int:
        return self._data[self.place] if self.place < self._limit else -1

    def enter(self, tag: int, *, is_length: bool = True) -> bool:
        """Read tag and varint, which sets `length`; return False if the bytes differ."""
        if self.peek() != tag:
            return False
        size = 1
        # PADDING ends every varint.
        while size <= _LONGEST_LENGTH and self._data[self.place + size] >= 128:
            size += 1
        first = self.place + 1
        self.place = first + size
        self.length = sum((self._data[first + n] & 127) << 7 * n for n in range(size))
        end = self.place + self.length
        if size > _LONGEST_LENGTH or end > (self._limit if self._end is None else self._end):
            return False
        if not is_length:
            return True
        self._varints.append((first - self._start, size))
        is_consistent = self._end in (None, end)
        self._end = end
        return is_consistent

    def take(self, size: int) -> bytes:
        self.place += size
        return self._data[self.place - size : self.place]

    def at_end(self) -> bool:
        return self.place == self._end

    def layout(self, key: bytes, kind: int, *, fixed: bool = False) -> Layout:
        head = self._data[self._start : self.place]
        return Layout(head, () if fixed else tuple(self._varints), key, kind)


def _as_words(data: bytes, width: int) -> np.ndarray:
    return np.frombuffer(data.ljust(width, b"\0"), np.uint64).reshape(-1, 1)


def _all(mask: np.ndarray) -> bool:
    return np.count_nonzero(mask) == mask.size  # takes a third of the time of mask.all()


def _decode(table: np.ndarray, place: int, size: int, is_narrow: bool) -> np.ndarray:
    if is_narrow:
        return table[:, place]
    values = table[:, place].astype(np.int64) & 127
    for n in range(1, size):
        values |= (table[:, place + n].astype(np.int64) & 127) << 7 * n
    return values


def _narrow(
    fits: np.ndarray | None, agree: np.ndarray | None, starts: np.ndarray, lengths: np.ndarray
) -> Match | None:
    """Return the match of rows in both masks; `agree` has only the rows that `fits` kept."""
    if agree is None:
        return Match(fits, starts, lengths)
    if not agree.any():
        return None
    if fits is None:
        fits = agree
    else:
        fits[fits] = agree
    return Match(fits, starts[agree], lengths[agree])


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


_Finder = Callable[[bytes, int, int], Layout | None]


class Walker:
    """Walks through records in lock-step; caches which layouts occur at which entry.

    Records may differ: at each step those with the same layout advance together. Records that are
    not canonical are left to protobuf: fields out of order, unknown fields, unpacked lists,
    repeated keys.
    """

    def __init__(self, names: Sequence[str]):
        self._numbers = {key.encode(): number for number, key in enumerate(names)}
        self._expected: dict[int, tuple[Layout, ...]] = {}

    def walk(
        self, data: bytes, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[list[Spans], np.ndarray]:
        """Return the spans of each feature, and a mask of the records without valid spans.

        `data` must end with PADDING. NotCanonicalError if a payload of another feature is damaged.
        """
        return _Walk(self, data, starts, ends).run(len(self._numbers))

    def find(self, key: bytes) -> int | None:
        """Return the number of a feature; None if it was not requested."""
        return self._numbers.get(key)

    def expected(self, step: int) -> tuple[Layout, ...]:
        """Return the layouts to try first at a step."""
        return self._expected.get(step, ())

    def cache_layouts(self, step: int, met: dict[Layout, int]) -> None:
        """Cache the layouts of a step, the most frequent first."""
        if not met:
            return
        latest = sorted(met, key=lambda layout: met[layout], reverse=True)
        older = [layout for layout in self.expected(step) if layout not in met]
        # A single assignment, because threads may share a parser.
        self._expected[step] = tuple([*latest, *older][:_MAX_LAYOUTS])


class _Walk:
    """The state of one call: the place in each record, and the spans found."""

    def __init__(self, walker: Walker, data: bytes, starts: np.ndarray, ends: np.ndarray):
        self._walker = walker
        self._data = data
        self._ends = ends
        self._places = starts.copy()
        self._irregular = np.zeros(len(starts), bool)
        self._found: dict[int, Spans] = {}
        self._unused: list[Spans] = []  # of features that were not requested
        # Layouts that may fail on some records before protobuf would be faster.
        self._tries = 16 + len(starts) // 8

    def run(self, features: int) -> tuple[list[Spans], np.ndarray]:
        self._step(_HEADER, None, find_header)
        for step in range(_MAX_STEPS):
            going = self._places < self._ends
            count = np.count_nonzero(going)
            if not count:
                break
            self._step(step, None if count == len(going) else np.flatnonzero(going), find_layout)
        self._drop(np.flatnonzero(self._places < self._ends))
        for spans in self._unused:
            check_spans(self._data, spans)
        spans = [
            self._found.get(number) or Spans.absent(len(self._ends)) for number in range(features)
        ]
        return spans, self._irregular

    def _step(self, step: int, chosen: np.ndarray | None, find: _Finder) -> None:
        """Advance the chosen records (None: all) past one entry."""
        met: dict[Layout, int] = {}
        untried = list(self._walker.expected(step))
        while (chosen is None or len(chosen) >= _FEW_RECORDS) and self._tries:
            first = 0 if chosen is None else int(chosen[0])
            layout = untried.pop(0) if untried else self._inspect(first, find)
            if layout is None:  # leave the inspected record to protobuf
                chosen = np.arange(len(self._ends)) if chosen is None else chosen
                self._drop(chosen[:1])
                chosen = chosen[1:]
            elif match := layout.match(
                self._data, self._places if chosen is None else self._places[chosen]
            ):
                met[layout] = len(match.starts)
                matched, chosen = _split(chosen, match, len(self._ends))
                self._advance(layout, matched, match, is_header=step == _HEADER)
            self._tries -= chosen is None or len(chosen) > 0
        if chosen is None or len(chosen):
            self._drop(slice(None) if chosen is None else chosen)
        if len(met) > 1 or tuple(met) != self._walker.expected(step)[:1]:
            self._walker.cache_layouts(step, met)

    def _inspect(self, number: int, find: _Finder) -> Layout | None:
        return find(self._data, int(self._places[number]), int(self._ends[number]))

    def _advance(
        self, layout: Layout, matched: np.ndarray | None, match: Match, *, is_header: bool
    ) -> None:
        stops = match.starts + match.lengths
        ends = self._ends if matched is None else self._ends[matched]
        inside = stops == ends if is_header else stops <= ends
        if np.count_nonzero(inside) < len(inside):
            matched = np.arange(len(ends)) if matched is None else matched
            self._drop(matched[~inside])
            matched = matched[inside]
            stops = stops[inside]
            match = Match(None, match.starts[inside], match.lengths[inside])
        places = match.starts if is_header else stops
        if matched is None:
            self._places = places
        else:
            self._places[matched] = places
        if not is_header:
            self._record(layout, matched, match)

    def _record(self, layout: Layout, matched: np.ndarray | None, match: Match) -> None:
        number = self._walker.find(layout.key)
        spans = Spans(
            np.full(len(match.starts), layout.kind, np.uint8), match.starts, match.lengths
        )
        if number is None:
            if layout.kind in (INT64, BYTES_MESSAGE):
                self._unused.append(spans)
        elif matched is None and number not in self._found:
            self._found[number] = spans
        else:
            matched = np.arange(len(self._ends)) if matched is None else matched
            known = self._found.setdefault(number, Spans.absent(len(self._ends)))
            self._drop(matched[known.kinds[matched] != ABSENT])  # the key repeats
            known.put(matched, spans)

    def _drop(self, records: np.ndarray | slice) -> None:
        self._irregular[records] = True
        self._places[records] = self._ends[records]


def _split(
    chosen: np.ndarray | None, match: Match, count: int
) -> tuple[np.ndarray | None, np.ndarray]:
    """Split the chosen records (None: all) into those that matched and the others."""
    if match.fits is None:
        return chosen, np.empty(0, np.int64)
    chosen = np.arange(count) if chosen is None else chosen
    return chosen[match.fits], chosen[~match.fits]
