"""The hooks that come with ftrain."""

from ftrain.hooks.calling import Callback, FeedBatch, FinalOps
from ftrain.hooks.console import LogFile, Logging, ProgressBar
from ftrain.hooks.counting import StepCounter
from ftrain.hooks.crashing import CrashBundle
from ftrain.hooks.data_watch import DataWatch
from ftrain.hooks.evaluating import Evaluator
from ftrain.hooks.faults import Faults
from ftrain.hooks.ledger import Ledger
from ftrain.hooks.profiling import Profiler
from ftrain.hooks.saving import CheckpointSaver, SaveListener
from ftrain.hooks.stopping import NotFiniteError, StopAtStep, StopOnNaN, StopWhen
from ftrain.hooks.waiting import WaitForStep
from ftrain.hooks.writing import SummarySaver

__all__ = [
    "Callback",
    "CheckpointSaver",
    "CrashBundle",
    "DataWatch",
    "Evaluator",
    "Faults",
    "FeedBatch",
    "FinalOps",
    "Ledger",
    "LogFile",
    "Logging",
    "NotFiniteError",
    "Profiler",
    "ProgressBar",
    "SaveListener",
    "StepCounter",
    "StopAtStep",
    "StopOnNaN",
    "StopWhen",
    "SummarySaver",
    "WaitForStep",
]
