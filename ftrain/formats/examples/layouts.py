"""Layouts: the bytes around the values of one feature, as a pattern that is compared in many records at once.

On the wire an entry of an Example is `0A entry-length 0A key-length key 12 feature-length kind list-length 0A
payload-length payload`. With the key, the kind and the sizes of the four varints given, all bytes before the payload
are known but for the varints, and these have to agree: all of them end where the payload ends.
"""

from typing import Any, NamedTuple

import numpy as np

from ftrain.formats.examples.columns import BYTES, BYTES_MESSAGE, EMPTY, FLOAT, INT64, windows

_ENTRY, _KEY, _VALUE, _ITEM = 0x0A, 0x0A, 0x12, 0x0A  # tags
_KINDS = {0x0A: BYTES, 0x12: FLOAT, 0x1A: INT64}
_LONGEST_LENGTH = 4  # bytes of a length's varint; above 256 MB records are parsed one by one
_LONGEST_KEY = 256
_WORD = 8
_MOST_KNOWN = 64
_UNKNOWN: Any = object()  # None says that a row does not fit


class Match(NamedTuple):
    """The records that a layout fits, as a mask (None: all), and where their payloads lie."""

    fits: np.ndarray | None
    starts: np.ndarray
    lengths: np.ndarray


class Layout:
    """`head` are the bytes of one record, `varints` the places and sizes of the lengths among them."""

    def __init__(self, head: bytes, varints: tuple[tuple[int, int], ...], key: bytes, kind: int):
        self.key, self.kind = key, kind
        self._size, self._varints = len(head), varints
        self._width = -(-len(head) // _WORD) * _WORD
        self._is_narrow = all(size == 1 for _, size in varints)
        mask = bytearray(b"\xff" * len(head))
        for place, size in varints:
            mask[place : place + size] = b"\x80" * size  # how long the varint is, not which
        mask, head = (part.ljust(self._width, b"\0") for part in (bytes(mask), head))
        self._masks = np.frombuffer(mask, np.uint64).reshape(-1, 1)
        self._pattern = np.frombuffer(head, np.uint64).reshape(-1, 1) & self._masks
        self._last_word = int.from_bytes(b"\xff" * (_WORD - self._width + self._size), "little")
        self._known: dict[
            bytes, int | None
        ] = {}  # the lengths in rows that were all there was in a batch

    def match(self, data: bytes, places: np.ndarray) -> Match | None:
        """Which of the entries that begin at `places` have this layout; None if none has."""
        rows = windows(data, self._width)[places]
        columns = (
            rows.view(np.uint64).reshape(len(places), -1).T.copy()
        )  # long rows are compared faster
        columns[-1] &= self._last_word  # without what is behind the head
        if _all(columns == columns[:, :1]):  # as with values of one size everywhere
            length = self._single_length(columns[:, 0].copy())
            return (
                None
                if length is None
                else Match(None, places + self._size, np.full(len(places), length))
            )
        equal = (columns & self._masks) == self._pattern
        fits = None
        if not _all(equal):
            fits = np.logical_and.reduce(equal, axis=0)
            if not np.count_nonzero(fits):
                return None
            rows, places = rows[fits], places[fits]
        lengths, agree = self._lengths(rows.view(np.uint8).reshape(len(rows), -1))
        return _narrow(fits, agree, places + self._size, lengths)

    def _lengths(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The payload's length in each row, and a mask of the rows whose lengths agree (None: all)."""
        if not self._varints:
            return np.zeros(len(table), np.int64), None
        # Single bytes are compared as such: below 128 their differences cannot be taken for others.
        *outer, lengths = (
            _decode(table, place, size, self._is_narrow) for place, size in self._varints
        )
        agree = (lengths & 3) == 0 if self.kind == FLOAT else None
        for (place, size), values in zip(self._varints[:-1], outer, strict=True):
            equal = values - (self._size - place - size) == lengths
            agree = equal if agree is None else agree & equal
        return lengths.astype(np.int64), None if agree is None or _all(agree) else agree

    def _single_length(self, words: np.ndarray) -> int | None:
        """The same for one row; None if it does not fit."""
        row = words.tobytes()
        known = self._known.get(row, _UNKNOWN)
        if known is _UNKNOWN:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            lengths, agree = self._lengths(words.view(np.uint8).reshape(1, -1))
            fits = _all((words & self._masks[:, 0]) == self._pattern[:, 0]) and agree is None
            known = self._known[row] = int(lengths[0]) if fits else None
        return known


def find_layout(data: bytes, start: int, end: int) -> Layout | None:
    """The layout of the entry that begins at `start`; None if it is not canonical, or does not end by `end`."""
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
    """The layout of what stands before the first entry: one field that holds all of the record."""
    reader = _Reader(data, start, end)
    is_whole = reader.enter(_ENTRY) and reader.place + reader.length == end
    return reader.layout(b"", EMPTY) if is_whole else None


class _Reader:
    """Goes into one field after the other, all of which must end at the same place."""

    def __init__(self, data: bytes, start: int, end: int):
        self._data, self._start, self._limit = data, start, end
        self.place, self.length = start, 0
        self._end: int | None = None  # where all fields end, once the first was entered
        self._varints: list[tuple[int, int]] = []

    def copy(self) -> "_Reader":
        twin = _Reader(self._data, self._start, self._limit)
        twin.place, twin.length, twin._end = self.place, self.length, self._end
        twin._varints = [*self._varints]
        return twin

    def peek(self) -> int:
        return self._data[self.place] if self.place < self._limit else -1

    def enter(self, tag: int, *, is_length: bool = True) -> bool:
        """PastStep tag and varint, which is then `length`; False if this is not how the bytes go on."""
        if self.peek() != tag:
            return False
        size = 1
        while (
            size <= _LONGEST_LENGTH and self._data[self.place + size] >= 128
        ):  # the padding ends every varint
            size += 1
        first, self.place = self.place + 1, self.place + 1 + size
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


def _all(mask: np.ndarray) -> bool:
    return np.count_nonzero(mask) == mask.size  # a third of the time of mask.all()


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
    """A match of those that both masks keep; `agree` is over those that `fits` kept."""
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
