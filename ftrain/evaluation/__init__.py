"""Evaluation: metrics over a whole dataset, and of checkpoints as they appear."""

from ftrain.evaluation.checkpoints import evaluate_checkpoints
from ftrain.evaluation.dataset import evaluate, trace_evaluation

__all__ = ["evaluate", "evaluate_checkpoints", "trace_evaluation"]
