"""Input: sources read by index, and pipelines whose batch is a pure function of seed and step."""

from ftrain.data.pipeline import Pipeline as Pipeline
from ftrain.data.prefetch import Prefetcher as Prefetcher
from ftrain.data.prefetch import feed as feed
from ftrain.data.source import ArraySource as ArraySource
from ftrain.data.source import Source as Source
from ftrain.data.source import WindowSource as WindowSource
