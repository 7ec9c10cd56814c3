"""Sources: examples that are read by index, a whole batch of indices at once."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ftrain.formats.examples.columns import as_objects

Batch = dict[str, np.ndarray]
Example = dict[str, Any]


class Source(Protocol):
    """Anything with a length and a method `read`.

    Two more methods are optional. `where(index) -> str` names an example in messages.
    `order(positions, seed, shuffle) -> indices` chooses the example at each position of the endless
    stream; by default epochs follow each other.
    """

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices`, stacked along a leading axis.

        The caller owns the arrays and may change them.
        """
        ...


class RangeSource:
    """The integers below `length` as feature "index".

    Combine it with a MapSource for examples that are computed rather than read.
    """

    def __init__(self, length: int):
        if length < 0:
            raise ValueError(f"length must be >= 0, got {length}")
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"RangeSource({self._length})"

    def read(self, indices: np.ndarray) -> Batch:
        """Return the indices themselves."""
        return {"index": np.array(indices, np.int64)}


class WindowSource:
    """Windows of `length` elements of one long sequence, starting every `stride` elements."""

    def __init__(self, sequence: np.ndarray, length: int, *, stride: int = 1, name: str = "tokens"):
        if length < 1 or stride < 1:
            raise ValueError(f"length and stride must be >= 1, got {length} and {stride}")
        if len(sequence) < length:
            raise ValueError(f"a window of {length} is longer than the sequence of {len(sequence)}")
        self.windows = np.lib.stride_tricks.sliding_window_view(sequence, length)[::stride]
        self.name = name

    def __len__(self) -> int:
        return len(self.windows)

    def __repr__(self) -> str:
        return f"WindowSource({self.name}, {len(self)} windows)"

    def read(self, indices: np.ndarray) -> Batch:
        """Return the windows at `indices`."""
        return {self.name: self.windows[indices]}


class GrainSource:
    """The elements of a `grain.MapDataset`, or of any sequence with a length and an index.

    For transforms that were written for grain. Grain's random map and shuffle depend on the index
    alone, so batches stay repeatable. Elements are read one by one, tens of thousands per second;
    `Pipeline(..., workers=n)` reads them in worker processes. A `grain.IterDataset` has no random
    access: wrap it in a `Stream`.
    """

    def __init__(self, dataset: Any):
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                "GrainSource needs a dataset with a length and an index, such as a "
                f"grain.MapDataset, got {type(dataset).__name__}; wrap an iterable in a Stream"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"GrainSource({type(self.dataset).__name__})"

    def read(self, indices: np.ndarray) -> Batch:
        """Return the elements at `indices` as one batch."""
        return join_examples([self._element(int(index)) for index in indices], repr(self))

    def _element(self, index: int) -> Example:
        element = self.dataset[index]
        if element is None:
            raise ValueError(
                f"{self!r}: element {index} was filtered out: filter with a FilterSource instead"
            )
        return dict(element) if hasattr(element, "keys") else {"value": element}


def where(source: Source, index: int) -> str:
    """Return the name of an example for messages."""
    own = getattr(source, "where", None)
    return own(index) if own else f"{describe(source)}: example {index}"


def describe(source: Any) -> str:
    """Return the name of a source for messages: its repr if it defines one, else its class."""
    return repr(source) if type(source).__repr__ is not object.__repr__ else type(source).__name__


def check_batch(batch: Any, count: int, maker: str) -> Batch:
    """Return the batch if it is a dict of arrays of `count` examples; `maker` names its origin."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"{maker} must return a dict of arrays, got {type(batch).__name__}")
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != count:
            raise ValueError(
                f"{maker} returned {name} with shape {array.shape}, "
                f"expected {count} along the first axis"
            )
    return arrays


def split_examples(batch: Batch) -> list[Example]:
    """Return the examples of a batch."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def join_examples(examples: Sequence[Example], maker: str) -> Batch:
    """Return a batch of the examples; features of unequal shapes become object arrays.

    `maker` names the origin of the examples in errors.
    """
    for example in examples:
        if not isinstance(example, Mapping):
            raise TypeError(f"{maker} must return a dict of values, got {type(example).__name__}")
    names = examples[0].keys() if examples else ()
    for example in itertools.islice(examples, 1, None):
        if example.keys() != names:
            raise ValueError(
                f"{maker} returned an example with features {', '.join(example)}, "
                f"expected {', '.join(names)} as in the first one"
            )
    batch = {name: to_rows([example[name] for example in examples]) for name in names}
    for name, column in batch.items():
        if column.dtype.hasobject:
            _check_dtypes(name, column, maker)
    return batch


def to_rows(values: list[Any]) -> np.ndarray:
    """Return values of examples as one array, an object array for text and unequal shapes."""
    if isinstance(values[0], (bytes, str)):
        return as_objects(values)
    return stack_objects(as_objects([np.asarray(value) for value in values]))


def stack_objects(column: np.ndarray) -> np.ndarray:
    """Stack an object array whose items are arrays of one shape and dtype; return others as is.

    So the type of a feature does not depend on which examples were read together.
    """
    if column.dtype != object or not all(isinstance(value, np.ndarray) for value in column):
        return column
    if len({value.shape for value in column}) > 1 or len({value.dtype for value in column}) > 1:
        return column
    return np.stack(list(column))


def size_of(batch: Batch) -> int:
    """Return the bytes of a batch; object arrays are estimated from their first items."""
    return sum(
        _object_bytes(array) if array.dtype.hasobject else array.nbytes for array in batch.values()
    )


def _check_dtypes(name: str, column: np.ndarray, maker: str) -> None:
    """Raise ValueError for several number dtypes: the result would depend on the batch."""
    # The dtype of an empty array is arbitrary.
    arrays = [value for value in column if isinstance(value, np.ndarray) and value.size]
    dtypes = {array.dtype for array in arrays if array.dtype.kind in "biufc"}
    if len(dtypes) > 1:
        raise ValueError(
            f"{maker} returned {name} as {' and as '.join(sorted(map(str, dtypes)))}; "
            "use one dtype for all examples"
        )


def _object_bytes(column: np.ndarray) -> int:
    sample = column.ravel()[:8]
    sizes = [
        getattr(value, "nbytes", None) or (len(value) if hasattr(value, "__len__") else 8)
        for value in sample
    ]
    return sum(sizes) * column.size // max(len(sizes), 1)
