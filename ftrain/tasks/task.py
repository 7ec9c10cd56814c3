"""A task: a model and its data, as a config trains them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ftrain.data import Source
from ftrain.evaluation.program import Predict
from ftrain.metrics import Metric
from ftrain.metrics.metric import check_metrics
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
      evaluate: parameters -> metrics on held-out examples, by a function of its own.
      input: arguments of the pipeline that a config cannot hold: "pad", for instance
        `{"tokens": Pad(64)}`, "buckets" and "transform". Only "pad" is also for evaluation.
      evaluation_source: the held-out examples, all of which `[evaluation]` measures; instead of
        `evaluate`.
      predict: (parameters, batch) -> outputs by name, each with an axis of examples; if the state
        has a model state, it is a third argument. See `ftrain.evaluate`. `ftrain.load`
        applies it too.
      metrics: of these outputs and the entries of the batch, by name; by default the mean of every
        output.
    """

    init: Callable[[jax.Array], Tree] | Model
    loss_fn: LossFunction
    source: Source
    evaluate: Callable[..., Mapping[str, Any]] | None = None
    input: Mapping[str, Any] = field(default_factory=dict)
    evaluation_source: Source | None = None
    predict: Predict | None = None
    metrics: Mapping[str, Metric] | None = None

    def __post_init__(self) -> None:
        check_init("init of a Task", self.init)
        self._check_evaluation()

    def _check_evaluation(self) -> None:
        if self.evaluation_source is not None:
            if self.evaluate is not None:
                raise ValueError("a Task has evaluate or evaluation_source, not both")
            if self.predict is None:
                raise ValueError("Task(evaluation_source=...) needs predict, a function to measure")
        elif self.metrics is not None:
            raise ValueError("Task(metrics=...) needs an evaluation_source to measure them on")
        if self.metrics is not None:
            check_metrics(self.metrics)
