"""Input: sources read by index, and pipelines whose batch is a pure function of seed and step."""

from ftrain.data.arrays import ArraySource
from ftrain.data.batching import Buckets, example_lengths
from ftrain.data.map_filter import FilterSource, MapSource
from ftrain.data.mixing import ConcatSource, MixSource
from ftrain.data.padding import Pad
from ftrain.data.pipeline import Pipeline
from ftrain.data.prefetch import Prefetcher, feed
from ftrain.data.records import ArrayRecordSource, RecordSource
from ftrain.data.source import GrainSource, RangeSource, Source, WindowSource
from ftrain.data.stream import Stream
from ftrain.data.text import TextSource

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
