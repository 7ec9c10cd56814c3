"""Input: sources read by index, and pipelines whose batch is a pure function of seed and step."""

from ftrain.data.pieces import Piece, stack
from ftrain.data.pipeline import Pipeline
from ftrain.data.prefetch import Prefetcher, feed, feed_pieces
from ftrain.data.source import ArraySource, Source, WindowSource

__all__ = [
    "ArraySource",
    "Piece",
    "Pipeline",
    "Prefetcher",
    "Source",
    "WindowSource",
    "feed",
    "feed_pieces",
    "stack",
]
