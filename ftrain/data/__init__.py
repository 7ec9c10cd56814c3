"""Input: sources read by index, and pipelines whose batch is a pure function of seed and step."""

from ftrain.data.pipeline import Pipeline
from ftrain.data.prefetch import Prefetcher, feed
from ftrain.data.source import ArraySource, Source, WindowSource

__all__ = [
    "ArraySource",
    "Pipeline",
    "Prefetcher",
    "Source",
    "WindowSource",
    "feed",
]
