"""The hooks that come with ftrain."""

from ftrain.hooks.console import Logging, ProgressBar
from ftrain.hooks.counting import StepCounter
from ftrain.hooks.evaluating import Evaluator
from ftrain.hooks.saving import CheckpointSaver
from ftrain.hooks.stopping import NotFiniteError, StopAtStep, StopOnNaN
from ftrain.hooks.writing import SummarySaver

__all__ = [
    "CheckpointSaver",
    "Evaluator",
    "Logging",
    "NotFiniteError",
    "ProgressBar",
    "StepCounter",
    "StopAtStep",
    "StopOnNaN",
    "SummarySaver",
]
