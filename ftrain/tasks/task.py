"""A task: a model and its data, as a config trains them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ftrain.data import Source
from ftrain.models import Model
from ftrain.training.arguments import check_no_object
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

    def __post_init__(self):
        check_no_object("init of a Task", self.init, "a function of a key, or a Model")
        if isinstance(getattr(self.init, "__self__", None), Model):
            raise TypeError("init of a Task is a method of a Model: pass the model itself")
        if not isinstance(self.init, Model) and not callable(self.init):
            raise TypeError(
                "init of a Task must be a function of a key that returns parameters, or an "
                f"ftrain.models.Model, got a {type(self.init).__name__}"
            )
