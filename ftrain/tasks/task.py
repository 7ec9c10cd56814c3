"""A task: all that a config needs to know of a model and its data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ftrain.data import Source
from ftrain.training.objective import LossFunction
from ftrain.tree import Tree


@dataclass(frozen=True)
class Task:
    """A function that answers with a Task can be named in a config; its keyword arguments are the keys of `[model]`."""

    init: Callable[[jax.Array], Tree]  # rng -> parameters
    loss_fn: LossFunction
    source: Source  # the examples to train on
    evaluate: Callable[[Tree], Mapping[str, float | str]] | None = None  # parameters -> what is measured on others
    input: Mapping[str, Any] = field(default_factory=dict)  # more arguments of its Pipeline: pad, buckets, transform
