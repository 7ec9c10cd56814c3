"""The public names, guarded: a change here is a change for users."""

import importlib
import subprocess
import sys
import types

import pytest

import ftrain

ROOMS = {
    "averages": {"ZeroDebiased", "average_names", "averaged", "start_averages", "update_averages"},
    "checkpoints": {
        "Catalog",
        "CheckpointError",
        "CheckpointManager",
        "CheckpointReader",
        "DamagedError",
        "HeldElsewhereError",
        "InUseError",
        "LeafMismatchError",
        "Record",
        "SaveError",
        "VocabInfo",
        "checkpoint_exists",
        "checkpoint_state",
        "checkpoints_iterator",
        "digest_leaves",
        "export",
        "hold",
        "init_from_checkpoint",
        "is_held",
        "latest_checkpoint",
        "list_variables",
        "load_variable",
        "open_reader",
        "read_catalog",
        "verify",
        "wait_for_checkpoint",
        "warm_start",
    },
    "coordination": {"Coordinator", "EndOfData", "LooperThread", "call_all"},
    "cluster": {
        "ClusterError",
        "ClusterSpec",
        "ProcessGroup",
        "ProcessMismatchError",
        "Membership",
        "PeerLostError",
        "Sharding",
        "batch_shard",
        "bytes_per_device",
        "check_usable",
        "connect",
        "create_local",
        "make_mesh",
        "membership",
        "processes",
        "split_batch",
    },
    "data": {
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
    },
    "formats": {
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
        "Padded",
        "Ragged",
        "Raw",
        "RecordFiles",
        "RecordIndex",
        "RecordWriter",
        "SequenceExample",
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
        "format_state",
        "frame_record",
        "index_records",
        "is_tf_checkpoint",
        "latest_tf_checkpoint",
        "match_files",
        "parse_examples",
        "parse_sequence_examples",
        "parse_state",
        "read_records",
    },
    "gradients": {
        "Rows",
        "WeightedMean",
        "accumulate",
        "as_transform",
        "clip_by_average_norm",
        "clip_by_global_norm",
        "clip_by_norm",
        "clip_by_value",
        "densify",
        "global_norm",
        "guard",
        "lookup",
        "loss_scale",
        "loss_scaling",
        "map_values",
        "mean_over_replicas",
        "skipped_updates",
        "update_with_rows",
        "value_and_grad",
    },
    "hooks": {
        "Callback",
        "CheckpointSaver",
        "CrashBundle",
        "DataFingerprint",
        "Evaluator",
        "Faults",
        "FeedBatch",
        "FinalOps",
        "DigestLog",
        "LogFile",
        "Logging",
        "NonFiniteError",
        "Profiler",
        "ProgressBar",
        "SaveListener",
        "StepCounter",
        "StopAtStep",
        "StopOnNaN",
        "StopWhen",
        "SummarySaver",
        "WaitForStep",
    },
    "models": {"Model", "equinox", "haiku", "linen", "nnx"},
    "optimizers": {
        "Arrivals",
        "Group",
        "GroupError",
        "LearningRate",
        "OptimizerState",
        "Rounding",
        "Rule",
        "adadelta",
        "adagrad",
        "adagrad_da",
        "adam",
        "apply_updates",
        "arrivals",
        "averaged_params",
        "current_learning_rate",
        "from_rule",
        "ftrl",
        "get_slot",
        "gradient_descent",
        "group_learning_rates",
        "groups",
        "momentum",
        "proximal_adagrad",
        "proximal_gradient_descent",
        "rmsprop",
        "slot_names",
        "sync_replicas",
    },
    "schedules": {
        "Schedule",
        "Scheduled",
        "cosine_decay",
        "cosine_decay_restarts",
        "exponential_decay",
        "inverse_sqrt",
        "inverse_time_decay",
        "join",
        "linear_cosine_decay",
        "natural_exp_decay",
        "noisy_linear_cosine_decay",
        "piecewise_constant",
        "polynomial_decay",
        "value_at",
        "warmup",
        "warmup_stable_decay",
    },
    "summaries": {
        "BackgroundWriter",
        "MetricsFile",
        "SummaryWriter",
        "read_events",
        "read_metrics",
    },
    "tasks": {"Task", "digits", "source_lm"},
    "training": {
        "Fuse",
        "Hook",
        "Loop",
        "StepMetrics",
        "NotReadyError",
        "ReplayError",
        "Report",
        "RunMismatchError",
        "Scaffold",
        "TrainState",
        "Trigger",
        "UnknownMetricError",
        "at",
        "compile_step",
        "every",
        "first",
        "locate",
        "make_step",
        "never",
        "read_crash",
        "stop_on_signals",
        "timer",
        "use_compilation_cache",
    },
    "tree": {"Tree", "count_bytes", "count_elements", "named_leaves"},
}
NAMES = {
    "Hook",
    "Run",
    "TrainState",
    "WeightedMean",
    "apply_updates",
    "at",
    "compile_step",
    "evaluate_checkpoints",
    "every",
    "first",
    "make_step",
    "train",
}


def test_the_package_exports_its_rooms_and_the_names_of_the_readme():
    assert set(ftrain.__all__) == {"__version__", *ROOMS, *NAMES}
    for name in ftrain.__all__:
        assert getattr(ftrain, name) is not None
    assert set(dir(ftrain)) == set(ftrain.__all__)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_exports_its_public_names(room):
    module = importlib.import_module(f"ftrain.{room}")
    for name in ROOMS[room]:
        assert hasattr(module, name)
    # A package re-exports exactly these; a module also imports what it needs.
    if hasattr(module, "__path__"):
        shown = {
            name for name, value in vars(module).items() if not isinstance(value, types.ModuleType)
        }
        assert (
            {name for name in shown if not name.startswith("_")}
            == ROOMS[room]
            == set(module.__all__)
        )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'optimisers'"):
        ftrain.optimisers  # noqa: B018 - the access itself is tested


def test_importing_ftrain_does_not_import_jax():
    code = "import sys, ftrain; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
