"""The pure core and the loop around it."""

from ftrain.training.compilation import use_compilation_cache
from ftrain.training.hook import Hook, Report
from ftrain.training.loop import Loop
from ftrain.training.signals import stop_on_signals
from ftrain.training.state import TrainState
from ftrain.training.step import compile_step, make_step
from ftrain.training.trigger import Trigger, at, every, first, never

__all__ = [
    "Hook",
    "Loop",
    "Report",
    "TrainState",
    "Trigger",
    "at",
    "compile_step",
    "every",
    "first",
    "make_step",
    "never",
    "stop_on_signals",
    "use_compilation_cache",
]
