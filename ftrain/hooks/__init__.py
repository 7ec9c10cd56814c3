"""The hooks that come with ftrain."""

from ftrain.hooks.console import Logging as Logging
from ftrain.hooks.console import ProgressBar as ProgressBar
from ftrain.hooks.counting import StepCounter as StepCounter
from ftrain.hooks.evaluating import Evaluator as Evaluator
from ftrain.hooks.saving import CheckpointSaver as CheckpointSaver
from ftrain.hooks.stopping import NotFiniteError as NotFiniteError
from ftrain.hooks.stopping import StopAtStep as StopAtStep
from ftrain.hooks.stopping import StopOnNaN as StopOnNaN
from ftrain.hooks.writing import SummarySaver as SummarySaver
