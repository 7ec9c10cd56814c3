"""Derived sources: other sources mapped, filtered, concatenated or mixed by weights."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ftrain.data.order import check_has_no_order, order_of, permute
from ftrain.data.source import (
    Batch,
    Source,
    check_batch,
    describe,
    join_examples,
    split_examples,
    stack_objects,
    where,
)
from ftrain.formats.examples.columns import as_objects

_CHUNK = 1024  # examples that are filtered together
_PERIOD = 10_000  # draws after which the shares of a mixture are exact, to 1 / _PERIOD


class MapSource:
    """The examples of a source changed by `function`, in the same number and order.

    The function gets whole batches, as a dict of arrays. It must treat each example alone, because
    the reader decides which examples are in a batch. With `each` it gets one example at a time.
    Use the `transform` of a Pipeline for random augmentation that differs between epochs.
    """

    def __init__(self, source: Source, function: Callable[[Any], Any], *, each: bool = False):
        self.source = source
        self.function = function
        self.each = each
        order = getattr(source, "order", None)
        if order is not None:
            self.order = order

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"MapSource({describe(self.source)}, {name_of(self.function)})"

    def where(self, index: int) -> str:
        """Return the name of an example for messages."""
        return where(self.source, index)

    def read(self, indices: np.ndarray) -> Batch:
        """Return the changed examples at `indices`."""
        batch = self.source.read(indices)
        name = name_of(self.function)
        if not self.each:
            result = call(self.function, batch, place=lambda: f"a batch of {describe(self.source)}")
            return check_batch(result, len(indices), name)
        result = [
            call(self.function, example, place=functools.partial(where, self.source, int(index)))
            for example, index in zip(split_examples(batch), indices, strict=True)
        ]
        return join_examples(result, name)


class FilterSource:
    """The examples of a source for which `keep`, given a batch, returns True in a boolean array.

    All examples are read once, at first use. The indices of the kept ones stay in memory.
    """

    def __init__(self, source: Source, keep: Callable[[Batch], np.ndarray]):
        check_has_no_order(source, "FilterSource")
        self.source = source
        self.keep = keep

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """The indices of the kept examples in the source."""
        chunks = (
            np.arange(at, min(at + _CHUNK, len(self.source)))
            for at in range(0, len(self.source), _CHUNK)
        )
        return np.concatenate([np.empty(0, np.int64), *map(self._filter, chunks)])

    def __len__(self) -> int:
        return len(self.kept)

    def __repr__(self) -> str:
        return f"FilterSource({describe(self.source)}, {name_of(self.keep)})"

    def where(self, index: int) -> str:
        """Return the name of an example for messages."""
        return where(self.source, int(self.kept[index]))

    def read(self, indices: np.ndarray) -> Batch:
        """Return the kept examples at `indices`."""
        return self.source.read(self.kept[indices])

    def _filter(self, indices: np.ndarray) -> np.ndarray:
        place = f"the examples from {indices[0]} to {indices[-1]} of {describe(self.source)}"
        mask = np.asarray(call(self.keep, self.source.read(indices), place=lambda: place))
        if mask.dtype != bool or mask.shape != indices.shape:
            raise ValueError(
                f"{name_of(self.keep)} must return {len(indices)} booleans, "
                f"got {mask.dtype}{list(mask.shape)}"
            )
        return indices[mask]


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def call(function: Callable[..., Any], *arguments: Any, place: Callable[[], str]) -> Any:
    """Call a user's function; an error gets a note with the function and `place`, its input."""
    try:
        return function(*arguments)
    except Exception as error:
        error.add_note(f"raised by {name_of(function)}, given {place()}")
        raise


class ConcatSource:
    """Concatenated sources; all must have features of the same names and dtypes."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)
        if not self.sources:
            raise ValueError(f"{type(self).__name__} needs at least one source")
        self._check_parts()
        self._starts = np.cumsum([0, *map(len, self.sources)])
        filled = [number for number, source in enumerate(self.sources) if len(source)]
        self._check_alike(filled, [self.sources[number].read(np.array([0])) for number in filled])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(describe, self.sources))})"

    def where(self, index: int) -> str:
        """Return the name of an example for messages."""
        part = int(np.searchsorted(self._starts, index, "right")) - 1
        return where(self.sources[part], index - int(self._starts[part]))

    def read(self, indices: np.ndarray) -> Batch:
        """Return the examples at `indices`, one read per source."""
        indices = np.asarray(indices)
        parts = np.searchsorted(self._starts, indices, "right") - 1
        chosen = np.unique(parts).tolist()
        rows = [np.flatnonzero(parts == part) for part in chosen]
        batches = [
            self.sources[part].read(indices[inside] - self._starts[part])
            for part, inside in zip(chosen, rows, strict=True)
        ]
        if not batches:  # no indices: any source returns the empty batch
            return self.sources[0].read(indices)
        if len(batches) == 1:
            return batches[0]
        self._check_alike(chosen, batches)
        # Restore the order of the indices.
        back = np.argsort(np.concatenate(rows))
        return {name: _join([batch[name] for batch in batches])[back] for name in batches[0]}

    def _check_parts(self) -> None:
        for source in self.sources:
            check_has_no_order(source, "ConcatSource")

    def _check_alike(self, chosen: list[int], batches: list[Batch]) -> None:
        first = batches[0] if batches else {}
        for part, other in zip(chosen[1:], batches[1:], strict=True):
            for name in first.keys() | other.keys():
                found = _describe_feature(other, name)
                expected = _describe_feature(first, name)
                # Shapes may differ: the pipeline pads them later.
                dtypes = {form.partition("[")[0] for form in (found, expected)}
                if len(dtypes) > 1 and ("nothing" in dtypes or "objects" not in dtypes):
                    raise ValueError(
                        f"{describe(self.sources[part])} has {name} as {found}, but "
                        f"{describe(self.sources[chosen[0]])} has it as {expected}; "
                        "convert one of them with a MapSource"
                    )


class MixSource(ConcatSource):
    """Sources mixed by weights; each repeats its own epochs at a rate in proportion to its weight.

    Of every 10,000 draws each source gets its share, rounded to whole draws, at least one. The seed
    chooses which draws those are, even if the sources themselves are not shuffled. The number of
    draws in an epoch of the mixture is the number of examples in all sources.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]):
        super().__init__(sources)
        if len(weights) != len(self.sources):
            raise ValueError(
                f"weights must have an entry for each of the {len(self.sources)} sources, "
                f"got {len(weights)}"
            )
        if not all(np.isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError(f"weights must be finite and > 0, got {list(weights)}")
        if len(weights) > _PERIOD // 10:
            raise ValueError(f"at most {_PERIOD // 10} sources can be mixed, got {len(weights)}")
        self.quotas = _quotas(np.asarray(weights, float))

    def order(self, positions: np.ndarray, seed: int, shuffle: bool) -> np.ndarray:
        """Return the index of the example at each position of the endless stream."""
        periods, draws = np.divmod(positions, _PERIOD)
        parts = np.empty_like(draws)
        own = np.empty_like(draws)  # positions in the streams of the parts
        for period in np.unique(periods).tolist():
            inside = periods == period
            chosen, ranks = _draw_period(tuple(self.quotas.tolist()), (seed, period, _PERIOD))
            parts[inside] = chosen[draws[inside]]
            own[inside] = ranks[draws[inside]]
        own += periods * self.quotas[parts]  # draws of the part in earlier periods
        indices = np.empty_like(own)
        for part in np.unique(parts).tolist():
            inside = parts == part
            own_seed = int(np.random.SeedSequence((seed, part)).generate_state(1)[0])
            indices[inside] = (
                order_of(self.sources[part], own[inside], own_seed, shuffle) + self._starts[part]
            )
        return indices

    def _check_parts(self) -> None:
        for source in self.sources:
            if not len(source):
                raise ValueError(f"{describe(source)} has no examples to mix")


@functools.lru_cache(maxsize=8)
def _draw_period(quotas: tuple[int, ...], key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the part of each draw of a period, and how many earlier draws of it had that part."""
    parts = np.repeat(np.arange(len(quotas)), quotas)[permute(np.arange(_PERIOD), _PERIOD, key)]
    by_part = np.argsort(parts, kind="stable")
    ranks = np.empty_like(parts)
    ranks[by_part] = np.arange(_PERIOD) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    return parts, ranks


def _quotas(weights: np.ndarray) -> np.ndarray:
    """Return the draws of each source in a period; the largest remainders are rounded up."""
    exact = weights / weights.sum() * _PERIOD
    quotas = np.maximum(np.floor(exact), 1).astype(np.int64)
    while quotas.sum() < _PERIOD:
        quotas[np.argmax(exact - quotas)] += 1
    while quotas.sum() > _PERIOD:
        quotas[np.argmin(np.where(quotas > 1, exact - quotas, np.inf))] -= 1
    return quotas


def _describe_feature(batch: Batch, name: str) -> str:
    if name not in batch:
        return "nothing"
    array = batch[name]
    return "objects" if array.dtype.hasobject else f"{array.dtype}{list(array.shape[1:])}"


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    has_objects = any(array.dtype.hasobject for array in arrays)
    if has_objects or len({array.shape[1:] for array in arrays}) > 1:
        return stack_objects(as_objects([value for array in arrays for value in array]))
    return np.concatenate(arrays)
