"""The pure core and the loop around it."""

from ftrain.training.compiled_step import compile_step, use_compilation_cache
from ftrain.training.crash import read_crash
from ftrain.training.fusion import Fuse
from ftrain.training.hook import Hook, Report
from ftrain.training.loop import Loop
from ftrain.training.precision import Precision, PrecisionError
from ftrain.training.record import RunMismatchError
from ftrain.training.recovery import NotReadyError, Scaffold
from ftrain.training.remat import Remat
from ftrain.training.replay import ReplayError, locate
from ftrain.training.state import TrainState
from ftrain.training.step import make_step
from ftrain.training.step_metrics import StepMetrics, UnknownMetricError
from ftrain.training.stopping import stop_on_signals
from ftrain.training.trigger import Trigger, at, every, first, never, timer

__all__ = [
    "Fuse",
    "Hook",
    "Loop",
    "NotReadyError",
    "Precision",
    "PrecisionError",
    "Remat",
    "ReplayError",
    "Report",
    "RunMismatchError",
    "Scaffold",
    "StepMetrics",
    "TrainState",
    "Trigger",
    "UnknownMetricError",
    "at",
    "compile_step",
    "every",
    "first",
    "locate",
    "make_step",
    "never",
    "read_crash",
    "stop_on_signals",
    "timer",
    "use_compilation_cache",
]
