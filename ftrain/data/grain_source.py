"""Grain: a MapDataset as a source."""

from typing import Any

import numpy as np

from ftrain.data.changing import join
from ftrain.data.source import Batch


class GrainSource:
    """The elements, dicts, of a `grain.MapDataset`, or of any sequence with a length that is indexed one by one.

    For transforms that were written for grain. Its own random map and shuffle depend on the index alone, so batches
    stay repeatable. It reads element by element, tens of thousands a second; `Pipeline(..., workers=n)` lets processes
    do that. A `grain.IterDataset` cannot be asked for an element by number: it is a `Stream`.
    """

    def __init__(self, dataset: Any):
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"a GrainSource takes a dataset with a length and an index, such as a grain.MapDataset; "
                f"{type(dataset).__name__} is none: it may be a Stream"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"GrainSource({type(self.dataset).__name__})"

    def read(self, indices: np.ndarray) -> Batch:
        return join([self._element(int(index)) for index in indices], repr(self))

    def _element(self, index: int) -> dict[str, Any]:
        element = self.dataset[index]
        if element is None:
            raise ValueError(
                f"{self!r}: element {index} was filtered out: filter with a FilterSource instead"
            )
        return dict(element) if hasattr(element, "keys") else {"value": element}
