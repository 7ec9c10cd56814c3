"""ftrain: the training toolkit that JAX lacks, as pure functions over pytrees."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftrain import averages as averages
    from ftrain import checkpoints as checkpoints
    from ftrain import cluster as cluster
    from ftrain import coordination as coordination
    from ftrain import data as data
    from ftrain import formats as formats
    from ftrain import gradients as gradients
    from ftrain import hooks as hooks
    from ftrain import metrics as metrics
    from ftrain import models as models
    from ftrain import optimizers as optimizers
    from ftrain import schedules as schedules
    from ftrain import summaries as summaries
    from ftrain import tasks as tasks
    from ftrain import training as training
    from ftrain import tree as tree
    from ftrain.evaluation import evaluate as evaluate
    from ftrain.evaluation import evaluate_checkpoints as evaluate_checkpoints
    from ftrain.gradients import WeightedMean as WeightedMean
    from ftrain.loading import load as load
    from ftrain.optimizers import apply_updates as apply_updates
    from ftrain.run import Run as Run
    from ftrain.run import train as train
    from ftrain.training import Hook as Hook
    from ftrain.training import Precision as Precision
    from ftrain.training import TrainState as TrainState
    from ftrain.training import at as at
    from ftrain.training import compile_step as compile_step
    from ftrain.training import every as every
    from ftrain.training import first as first
    from ftrain.training import make_step as make_step

__version__ = "0.1.0"

_ROOMS = (
    "averages",
    "checkpoints",
    "cluster",
    "coordination",
    "data",
    "formats",
    "gradients",
    "hooks",
    "metrics",
    "models",
    "optimizers",
    "schedules",
    "summaries",
    "tasks",
    "training",
    "tree",
)
_NAMES = {
    "Hook": "ftrain.training",
    "Precision": "ftrain.training",
    "Run": "ftrain.run",
    "TrainState": "ftrain.training",
    "WeightedMean": "ftrain.gradients",
    "apply_updates": "ftrain.optimizers",
    "at": "ftrain.training",
    "compile_step": "ftrain.training",
    "evaluate": "ftrain.evaluation",
    "evaluate_checkpoints": "ftrain.evaluation",
    "every": "ftrain.training",
    "first": "ftrain.training",
    "load": "ftrain.loading",
    "make_step": "ftrain.training",
    "train": "ftrain.run",
}
__all__ = [
    "__version__",
    *_ROOMS,  # pyright: ignore[reportUnsupportedDunderAll] - resolved lazily
    *_NAMES,
]


def __getattr__(name: str) -> Any:
    # Resolved when first used, so that `ftrain --help` does not pay for importing jax.
    if name in _ROOMS:
        return importlib.import_module(f"ftrain.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'ftrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
