"""The hooks that come with ftrain: stopping, logging, saving, summaries, evaluation, profiling."""

from ftrain.hooks.callback import Callback, Evaluator, FeedBatch, FinalOps
from ftrain.hooks.checkpoint import CheckpointSaver, SaveListener, WaitForStep
from ftrain.hooks.console import LogFile, Logging, ProgressBar
from ftrain.hooks.diagnostics import CrashBundle, DataFingerprint, DigestLog
from ftrain.hooks.faults import Faults
from ftrain.hooks.profiling import Profiler
from ftrain.hooks.stopping import NonFiniteError, StopAtStep, StopOnNaN, StopWhen
from ftrain.hooks.summary import StepCounter, SummarySaver

__all__ = [
    "Callback",
    "CheckpointSaver",
    "CrashBundle",
    "DataFingerprint",
    "DigestLog",
    "Evaluator",
    "Faults",
    "FeedBatch",
    "FinalOps",
    "LogFile",
    "Logging",
    "NonFiniteError",
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
