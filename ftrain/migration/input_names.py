"""Input queues and records: names of TensorFlow 1 and their counterparts."""

from ftrain.migration.counterpart import Counterpart, to

_PIPELINE = (
    "Pipeline(source, batch_size=...): batch = f(seed, step); num_threads is threads, "
    "capacity has no counterpart"
)
_SHUFFLED = (
    f"{_PIPELINE}; all of an epoch is shuffled, so min_after_dequeue has none either "
    "(a Stream's is shuffle_buffer)"
)
_FINAL = "allow_smaller_final_batch=True is last='keep'"
_PADDED = "dynamic_pad=True is pad={'name': Pad(multiple=16)}"
_KEPT = "keep_input becomes FilterSource(source, lambda batch: batch['label'] < 5)"
_PRODUCER = (
    "a Pipeline repeats epochs by itself; its arguments epochs, shuffle and seed are num_epochs, "
    "shuffle and seed"
)
_MESSAGE = (
    "the same message, byte for byte; encode_example and decode_example work on dicts of arrays"
)

TABLE: dict[str, Counterpart] = {
    # queues
    "tf.contrib.training.bucket_by_sequence_length": to(
        "ftrain.data.Buckets",
        "ftrain.data.example_lengths",
        note="Pipeline(..., buckets=Buckets(lengths, boundaries))",
    ),
    "tf.contrib.training.bucket": to(
        "ftrain.data.Buckets", note="lengths may be any numbers to bucket by"
    ),
    "tf.contrib.training.rejection_sample": to("ftrain.data.FilterSource", "ftrain.data.MixSource"),
    "tf.contrib.training.stratified_sample": to(
        "ftrain.data.FilterSource",
        "ftrain.data.MixSource",
        note="a FilterSource for each class, mixed by weights",
    ),
    "tf.FIFOQueue": to("ftrain.data.feed", note="a run prefetches its data by itself"),
    "tf.RandomShuffleQueue": to("ftrain.data.Pipeline", "ftrain.data.Stream"),
    "tf.PaddingFIFOQueue": to("ftrain.data.Pad", note="Pipeline(..., pad={'name': Pad()})"),
    "tf.errors.OutOfRangeError": to(
        "ftrain.coordination.EndOfData", note="a run ends with its data by itself"
    ),
    "tf.train.batch": to(
        "ftrain.data.Pipeline",
        "ftrain.data.Stream",
        note=f"{_PIPELINE}, shuffle=False; {_FINAL}, {_PADDED}; "
        "a Stream for generators and sockets",
    ),
    "tf.train.shuffle_batch": to(
        "ftrain.data.Pipeline", "ftrain.data.Stream", note=f"{_SHUFFLED}; {_FINAL}"
    ),
    "tf.train.batch_join": to(
        "ftrain.data.ConcatSource",
        "ftrain.data.Pipeline",
        note="one source of several, then a Pipeline with shuffle=False",
    ),
    "tf.train.shuffle_batch_join": to(
        "ftrain.data.ConcatSource",
        "ftrain.data.MixSource",
        "ftrain.data.Pipeline",
        note="one source of several, then a Pipeline",
    ),
    "tf.train.maybe_batch": to(
        "ftrain.data.FilterSource",
        "ftrain.data.Pipeline",
        note=f"{_KEPT}; shuffle=False",
    ),
    "tf.train.maybe_batch_join": to(
        "ftrain.data.FilterSource",
        "ftrain.data.ConcatSource",
        note="filter each source, join them; shuffle=False",
    ),
    "tf.train.maybe_shuffle_batch": to(
        "ftrain.data.FilterSource",
        "ftrain.data.Pipeline",
        note=_KEPT,
    ),
    "tf.train.maybe_shuffle_batch_join": to(
        "ftrain.data.FilterSource",
        "ftrain.data.ConcatSource",
        note="filter each source, join them, then a Pipeline",
    ),
    "tf.train.input_producer": to(
        "ftrain.data.ArraySource", "ftrain.data.Pipeline", note=_PRODUCER
    ),
    "tf.train.range_input_producer": to("ftrain.data.RangeSource", note=_PRODUCER),
    "tf.train.slice_input_producer": to("ftrain.data.ArraySource", note=_PRODUCER),
    "tf.train.string_input_producer": to(
        "ftrain.data.RecordSource",
        "ftrain.data.TextSource",
        "ftrain.data.ArraySource",
        note="sources take files and patterns; for other strings, ArraySource(dict(name=strings)); "
        f"{_PRODUCER}",
    ),
    "tf.train.limit_epochs": to(
        "ftrain.data.Pipeline", note="Pipeline(epochs=n); a run then ends with its data"
    ),
    "tf.train.match_filenames_once": to(
        "ftrain.formats.match_files",
        note="sources match patterns by themselves, once, when they are made",
    ),
    # records
    "tf.train.Example": to(
        "ftrain.formats.Example",
        "ftrain.formats.encode_example",
        "ftrain.formats.decode_example",
        note=_MESSAGE,
    ),
    "tf.train.SequenceExample": to(
        "ftrain.formats.SequenceExample",
        "ftrain.formats.encode_sequence_example",
        "ftrain.formats.decode_sequence_example",
        note="the same message, byte for byte",
    ),
    "tf.train.Features": to("ftrain.formats.Features", note=_MESSAGE),
    "tf.train.Feature": to("ftrain.formats.Feature", note=_MESSAGE),
    "tf.train.FeatureLists": to(
        "ftrain.formats.FeatureLists", note="the same message, byte for byte"
    ),
    "tf.train.FeatureList": to(
        "ftrain.formats.FeatureList", note="the same message, byte for byte"
    ),
    "tf.train.BytesList": to("ftrain.formats.BytesList", note=_MESSAGE),
    "tf.train.FloatList": to("ftrain.formats.FloatList", note=_MESSAGE),
    "tf.train.Int64List": to("ftrain.formats.Int64List", note=_MESSAGE),
    "tf.python_io.TFRecordWriter": to(
        "ftrain.formats.RecordWriter", note="rotates shards with shard_records or shard_bytes"
    ),
    "tf.python_io.tf_record_iterator": to(
        "ftrain.formats.read_records", note="finds out the compression by itself"
    ),
    "tf.TFRecordReader": to(
        "ftrain.data.RecordSource", note="read by index, so that a run can resume exactly"
    ),
    "tf.TextLineReader": to("ftrain.data.TextSource"),
    "tf.parse_example": to(
        "ftrain.formats.parse_examples",
        "ftrain.data.RecordSource",
        note="FixedLenFeature is Fixed, VarLenFeature is Padded or Ragged; "
        "RecordSource(files, spec) parses",
    ),
    "tf.parse_single_example": to("ftrain.formats.parse_examples", note="of a list of one"),
    "tf.parse_single_sequence_example": to(
        "ftrain.formats.parse_sequence_examples", note="of a list of one"
    ),
    "tf.FixedLenFeature": to("ftrain.formats.Fixed", note="default_value is default"),
    "tf.VarLenFeature": to("ftrain.formats.Padded", "ftrain.formats.Ragged"),
    "tf.FixedLenSequenceFeature": to("ftrain.formats.Padded", "ftrain.formats.Steps"),
    "tf.parse_sequence_example": to("ftrain.formats.parse_sequence_examples"),
    "tf.python_io.TFRecordOptions": to(
        "ftrain.formats.RecordWriter", note="its argument compression"
    ),
    "tf.data.TFRecordDataset": to(
        "ftrain.data.RecordSource", note="with Pipeline for shuffle, repeat, batch and map"
    ),
    "tf.decode_csv": to(
        "ftrain.formats.encode_example", note="ftrain data convert table.csv table.tfrecord"
    ),
    "tf.WholeFileReader": to(
        "ftrain.data.MapSource", note="of an ArraySource of paths, with a function that reads"
    ),
    "tf.decode_raw": to("ftrain.formats.Raw"),
    "tf.image.decode_png": to("ftrain.formats.Image"),
    "tf.image.decode_jpeg": to("ftrain.formats.Image"),
}
