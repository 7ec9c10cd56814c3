"""Summaries: what a run measured, for TensorBoard and for scripts."""

from ftrain.summaries.metrics_file import MetricsFile as MetricsFile
from ftrain.summaries.metrics_file import read_metrics as read_metrics
from ftrain.summaries.writer import SummaryWriter as SummaryWriter
from ftrain.summaries.writer import read_events as read_events
