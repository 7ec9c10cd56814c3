"""Tasks: the models and data that the shipped configs train."""

from ftrain.tasks.digits import digits
from ftrain.tasks.source_lm import source_lm
from ftrain.tasks.task import Task

__all__ = [
    "Task",
    "digits",
    "source_lm",
]
