"""Summaries: the metrics of a run, for TensorBoard and for scripts."""

from ftrain.summaries.background import BackgroundWriter
from ftrain.summaries.metrics_file import MetricsFile, read_metrics
from ftrain.summaries.writer import SummaryWriter, read_events

__all__ = [
    "BackgroundWriter",
    "MetricsFile",
    "SummaryWriter",
    "read_events",
    "read_metrics",
]
