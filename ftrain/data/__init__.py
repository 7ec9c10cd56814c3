"""Input: sources read by index, and pipelines whose batch is a pure function of seed and step."""

from ftrain.data.arrays import ArraySource
from ftrain.data.batching import Buckets, Pad, example_lengths
from ftrain.data.derived_sources import ConcatSource, FilterSource, MapSource, MixSource
from ftrain.data.file_sources import ArrayRecordSource, RecordSource, TextSource
from ftrain.data.pipeline import Pipeline, Stream
from ftrain.data.prefetch import Prefetcher, feed
from ftrain.data.source import GrainSource, RangeSource, Source, WindowSource

__all__ = [
    "ArrayRecordSource",
    "ArraySource",
    "Buckets",
    "ConcatSource",
    "FilterSource",
    "GrainSource",
    "MapSource",
    "MixSource",
    "Pad",
    "Pipeline",
    "Prefetcher",
    "RangeSource",
    "RecordSource",
    "Source",
    "Stream",
    "TextSource",
    "WindowSource",
    "example_lengths",
    "feed",
]
