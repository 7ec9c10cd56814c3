"""A task: all that a config needs to know of a model and its data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ftrain.data import Source
from ftrain.training.loss import LossFunction
from ftrain.tree import Tree


@dataclass(frozen=True)
class Task:
    """A function that answers with a Task can be named in a config; its keyword arguments are the keys of `[model]`.

    Args:
      init: rng -> parameters.
      source: the examples to train on; `[data]` says how they are batched.
      evaluate: parameters -> what is measured on other examples.
      input: what a config cannot say of the pipeline, for instance `{"pad": {"tokens": Pad(64)}}`; "buckets" and
        "transform" may be there too.
    """

    init: Callable[[jax.Array], Tree]
    loss_fn: LossFunction
    source: Source
    evaluate: Callable[[Tree], Mapping[str, float | str]] | None = None
    input: Mapping[str, Any] = field(default_factory=dict)
