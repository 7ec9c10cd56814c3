"""File formats: records, the Examples in them, tables, and checkpoints of other programs."""

from ftrain.formats.examples.features import Fixed, Image, Padded, Ragged, Raw, SpecError, Steps
from ftrain.formats.examples.messages import (
    BytesList,
    Example,
    Feature,
    FeatureList,
    FeatureLists,
    Features,
    FloatList,
    Int64List,
    SequenceExample,
    decode_example,
    decode_sequence_example,
    encode_example,
    encode_sequence_example,
)
from ftrain.formats.examples.parsing import ExampleParser, parse_examples, parse_sequence_examples
from ftrain.formats.npz_arrays import NpzError, NpzFile
from ftrain.formats.records.encoding import DamagedRecordError, frame_record
from ftrain.formats.records.files import RecordFiles, match_files
from ftrain.formats.records.index import RecordIndex, index_records
from ftrain.formats.records.reading import read_records
from ftrain.formats.records.writing import RecordWriter
from ftrain.formats.safetensors_files import (
    SafetensorsError,
    SafetensorsFile,
    ShardedSafetensors,
    find_safetensors,
    open_safetensors,
)
from ftrain.formats.tf_checkpoint import (
    TfCheckpoint,
    TfCheckpointError,
    TfCheckpointState,
    TfVariable,
    format_state,
    is_tf_checkpoint,
    latest_tf_checkpoint,
    parse_state,
)

__all__ = [
    "BytesList",
    "DamagedRecordError",
    "Example",
    "ExampleParser",
    "Feature",
    "FeatureList",
    "FeatureLists",
    "Features",
    "Fixed",
    "FloatList",
    "Image",
    "Int64List",
    "NpzError",
    "NpzFile",
    "Padded",
    "Ragged",
    "Raw",
    "RecordFiles",
    "RecordIndex",
    "RecordWriter",
    "SafetensorsError",
    "SafetensorsFile",
    "SequenceExample",
    "ShardedSafetensors",
    "SpecError",
    "Steps",
    "TfCheckpoint",
    "TfCheckpointError",
    "TfCheckpointState",
    "TfVariable",
    "decode_example",
    "decode_sequence_example",
    "encode_example",
    "encode_sequence_example",
    "find_safetensors",
    "format_state",
    "frame_record",
    "index_records",
    "is_tf_checkpoint",
    "latest_tf_checkpoint",
    "match_files",
    "open_safetensors",
    "parse_examples",
    "parse_sequence_examples",
    "parse_state",
    "read_records",
]
