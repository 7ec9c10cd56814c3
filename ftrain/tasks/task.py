"""A task: a model and its data, as a config trains them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ftrain.data import Source
from ftrain.models import Model
from ftrain.training.arguments import check_init
from ftrain.training.loss import LossFunction
from ftrain.tree import Tree


@dataclass(frozen=True)
class Task:
    """A loss, initial parameters and data; `task` in a config names a function that returns one.

    `[model]` holds the keyword arguments of that function.

    Args:
      init: rng -> parameters; or an `ftrain.models.Model`, which may have a model state. The loss
        function, and every other function here, then has it as one more last argument.
      source: the examples to train on; `[data]` defines the batches.
      evaluate: parameters -> metrics on held-out examples.
      input: arguments of the pipeline that a config cannot hold: "pad", for instance
        `{"tokens": Pad(64)}`, "buckets" and "transform".
    """

    init: Callable[[jax.Array], Tree] | Model
    loss_fn: LossFunction
    source: Source
    evaluate: Callable[[Tree], Mapping[str, float | str]] | None = None
    input: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_init("init of a Task", self.init)
