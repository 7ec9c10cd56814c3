"""Lock-step: the features of many Examples found together, one entry of every record at a time."""

from collections.abc import Callable, Sequence

import numpy as np

from ftrain.formats.examples.columns import ABSENT, BYTES_MESSAGE, INT64, Spans, check_spans
from ftrain.formats.examples.layouts import Layout, Match, find_header, find_layout

_Finder = Callable[[bytes, int, int], Layout | None]
_FEW = 8  # records for which a further pattern does not pay
_REMEMBERED = 8  # layouts that are tried at a step before any record is looked into
_MOST_STEPS = 256  # entries in a record
_HEADER = -1  # the step before the first entry


class Walker:
    """Walks through records side by side, and remembers from call to call which layouts it met at which entry.

    Records need not be alike: at each step those that begin with the same layout go on together. Whatever is not
    canonical is left to a parser: fields out of order, unknown ones, lists that are not packed, keys that repeat.
    """

    def __init__(self, wanted: Sequence[str]):
        self._wanted = {key.encode(): number for number, key in enumerate(wanted)}
        self._expected: dict[int, tuple[Layout, ...]] = {}

    def walk(
        self, data: bytes, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[list[Spans], np.ndarray]:
        """The spans of each wanted feature, and a mask of the records that were left out, whose spans say nothing.

        `data` ends with PADDING. UnusualError if the payload of a feature that is not wanted is damaged.
        """
        return _Walk(self, data, starts, ends).run(len(self._wanted))

    def find(self, key: bytes) -> int | None:
        return self._wanted.get(key)

    def expected(self, step: int) -> tuple[Layout, ...]:
        return self._expected.get(step, ())

    def remember(self, step: int, met: dict[Layout, int]) -> None:
        """The layout that most records had comes first. One assignment, since threads may share a parser."""
        if not met:
            return
        latest = sorted(met, key=lambda layout: met[layout], reverse=True)
        older = [layout for layout in self.expected(step) if layout not in met]
        self._expected[step] = tuple([*latest, *older][:_REMEMBERED])


class _Walk:
    """One call's records: how far each of them is, and what was found."""

    def __init__(self, walker: Walker, data: bytes, starts: np.ndarray, ends: np.ndarray):
        self._walker, self._data, self._ends = walker, data, ends
        self._places = starts.copy()
        self._odd = np.zeros(len(starts), bool)
        self._found: dict[int, Spans] = {}
        self._unwanted: list[Spans] = []
        self._tries = (
            16 + len(starts) // 8
        )  # patterns that may fail on some before parsing would be faster

    def run(self, wanted: int) -> tuple[list[Spans], np.ndarray]:
        self._step(_HEADER, None, find_header)
        for step in range(_MOST_STEPS):
            going = self._places < self._ends
            count = np.count_nonzero(going)
            if not count:
                break
            self._step(step, None if count == len(going) else np.flatnonzero(going), find_layout)
        self._drop(np.flatnonzero(self._places < self._ends))
        for spans in self._unwanted:
            check_spans(self._data, spans)
        spans = [
            self._found.get(number) or Spans.absent(len(self._ends)) for number in range(wanted)
        ]
        return spans, self._odd

    def _step(self, step: int, chosen: np.ndarray | None, find: _Finder) -> None:
        """Takes the chosen records (None: all) past one entry."""
        met: dict[Layout, int] = {}
        untried = list(self._walker.expected(step))
        while (chosen is None or len(chosen) >= _FEW) and self._tries:
            layout = (
                untried.pop(0)
                if untried
                else self._look(0 if chosen is None else int(chosen[0]), find)
            )
            if layout is None:  # so the first one is left out
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
            self._walker.remember(step, met)

    def _look(self, number: int, find: _Finder) -> Layout | None:
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
            matched, stops = matched[inside], stops[inside]
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
                self._unwanted.append(spans)
        elif matched is None and number not in self._found:
            self._found[number] = spans
        else:
            matched = np.arange(len(self._ends)) if matched is None else matched
            known = self._found.setdefault(number, Spans.absent(len(self._ends)))
            self._drop(matched[known.kinds[matched] != ABSENT])  # the key repeats
            known.put(matched, spans)

    def _drop(self, records: np.ndarray | slice) -> None:
        self._odd[records] = True
        self._places[records] = self._ends[records]


def _split(
    chosen: np.ndarray | None, match: Match, count: int
) -> tuple[np.ndarray | None, np.ndarray]:
    """Those of the chosen that the match is about (None: all records), and the others."""
    if match.fits is None:
        return chosen, np.empty(0, np.int64)
    chosen = np.arange(count) if chosen is None else chosen
    return chosen[match.fits], chosen[~match.fits]
