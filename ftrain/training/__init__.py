"""The pure core and the loop around it."""

from ftrain.training.compilation import use_compilation_cache as use_compilation_cache
from ftrain.training.hook import Hook as Hook
from ftrain.training.hook import Report as Report
from ftrain.training.loop import Loop as Loop
from ftrain.training.signals import stop_on_signals as stop_on_signals
from ftrain.training.state import TrainState as TrainState
from ftrain.training.step import compile_step as compile_step
from ftrain.training.step import make_step as make_step
from ftrain.training.trigger import Trigger as Trigger
from ftrain.training.trigger import at as at
from ftrain.training.trigger import every as every
from ftrain.training.trigger import first as first
from ftrain.training.trigger import never as never
