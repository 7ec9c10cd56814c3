"""Sources of record files, and what the whole pipeline promises of them."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.data import (
    ArrayRecordSource,
    Buckets,
    MapSource,
    MixSource,
    Pad,
    Pipeline,
    RecordSource,
    example_lengths,
    feed,
)
from ftrain.formats import (
    DamagedRecordError,
    Fixed,
    Padded,
    Ragged,
    RecordWriter,
    SpecError,
    encode_example,
    encode_sequence_example,
)

SPEC = {"n": Fixed(dtype="int64"), "floats": Fixed((3,)), "words": Ragged("int64")}


def example(number: int) -> bytes:
    words = np.full(number % 7, number)
    return encode_example(
        {"n": number, "floats": np.full(3, number / 2, np.float32), "words": words}
    )


def write(path, count: int = 100, **options):
    with RecordWriter(path, **options) as writer:
        for number in range(count):
            writer.write(example(number))
    return writer.paths


@pytest.fixture
def shards(tmp_path):
    """100 examples in 4 files."""
    return write(tmp_path / "train.tfrecord", shard_records=30)


@pytest.fixture
def pattern(shards):
    return str(shards[0].parent / "train-*.tfrecord")


def test_examples_of_many_files_are_read_by_number(pattern):
    source = RecordSource(pattern, SPEC)
    assert len(source) == 100
    batch = source.read(np.array([99, 0, 30, 30]))
    assert batch["n"].tolist() == [99, 0, 30, 30]
    assert batch["floats"][0].tolist() == [49.5] * 3
    assert [row.tolist() for row in batch["words"]] == [[99], [], [30, 30], [30, 30]]
    assert source.where(31).endswith("train-00001-of-00004.tfrecord: record 1")


def test_without_a_spec_records_are_bytes(shards):
    assert RecordSource(shards).read(np.array([7]))["record"].tolist() == [example(7)]


def test_sequences_are_padded_by_the_pipeline(tmp_path):
    with RecordWriter(tmp_path / "s.tfrecord") as writer:
        for number in range(10):
            steps = [np.full(2, at, np.float32) for at in range(number)]
            writer.write(encode_sequence_example({"n": number}, {"frames": steps}))
    source = RecordSource(
        tmp_path / "s.tfrecord", {"n": Fixed(dtype="int64")}, sequence={"frames": Ragged("float32")}
    )
    assert [len(frames) for frames in source.read(np.arange(10))["frames"]] == list(range(10))
    data = Pipeline(source, batch_size=5, shuffle=False, pad={"frames": Pad(9, lengths="count")})
    for step in range(2):
        batch = data.batch(step)
        assert batch["frames"].shape == (5, 9, 2)
        assert batch["frames"].dtype == np.float32
        assert batch["count"].tolist() == batch["n"].tolist()


def test_compressed_files_are_unpacked(tmp_path):
    paths = write(tmp_path / "train.gz", compression="GZIP")
    with pytest.raises(ValueError, match="random access needs a plain file"):
        RecordSource(paths, SPEC)
    source = RecordSource(paths, SPEC, cache=tmp_path / "cache")
    assert source.read(np.array([42]))["n"].tolist() == [42]


def test_a_damaged_record_is_told_by_file_number_and_place(shards, pattern):
    whole = bytearray(shards[1].read_bytes())
    whole[-6] ^= 1
    shards[1].write_bytes(whole)
    pipeline = Pipeline(RecordSource(pattern, SPEC), batch_size=10, shuffle=False)
    with pytest.raises(
        DamagedRecordError, match=r"00001-of-00004\.tfrecord: record 29 at byte \d+ is damaged"
    ) as caught:
        pipeline.batch(5)
    assert caught.value.__notes__[-1].startswith(
        "while reading the input of step 6 from RecordSource("
    )
    assert (
        caught.value.__notes__[0]
        == "RecordSource(..., on_damage='skip') leaves damaged records out"
    )
    with pytest.warns(
        UserWarning, match="skipped 1 damaged records; the first: .*record 29 at byte"
    ):
        skipping = RecordSource(pattern, SPEC, on_damage="skip")
    assert len(skipping) == 99
    assert [damage.number for damage in skipping.damages] == [29]
    assert 59 not in skipping.read(np.arange(99))["n"]


def test_what_does_not_fit_the_spec_is_told_with_feature_and_record(pattern):
    source = RecordSource(pattern, {"floats": Fixed((4,))})
    with pytest.raises(
        SpecError,
        match=r"00002-of-00004\.tfrecord: record 5: feature floats has 3 values, expected 4",
    ):
        source.read(np.array([65]))


@pytest.mark.parametrize("feature", [Padded(), Ragged(flat=True, lengths="n")])
def test_what_depends_on_the_company_is_refused(pattern, feature):
    with pytest.raises(ValueError, match=r"words: .* depends on which records are read together"):
        RecordSource(pattern, {"words": feature})


def test_a_misspelt_feature_is_told(pattern):
    with pytest.warns(
        UserWarning, match="none of the first 32 records has word; they have floats, n, words"
    ):
        source = RecordSource(pattern, {"word": Ragged("int64")})
    assert len(source.read(np.array([3]))["word"][0]) == 0
    with pytest.warns(UserWarning, match="has m; they have"):
        source = RecordSource(pattern, {"m": Fixed(dtype="int64")})
    with pytest.raises(
        SpecError, match=r"feature m has no values, expected 1 .*; the record has floats, n, words"
    ):
        source.read(np.arange(20))


def test_a_spec_is_a_mapping_and_gives_each_name_once(pattern):
    with pytest.raises(TypeError, match="a spec must map names to Fixed"):
        RecordSource(pattern, ["n"])
    with pytest.raises(ValueError, match="spec and sequence both make n"):
        RecordSource(pattern, {"n": Fixed()}, sequence={"n": Ragged()})


def pipelines(pattern) -> dict:
    """Pipelines of all kinds, as functions of further options."""
    source = RecordSource(pattern, SPEC)
    lengths = example_lengths(source, "words")
    pad = {"words": Pad(8)}
    return {
        "plain": lambda **more: Pipeline(source, batch_size=8, pad=pad, seed=7, **more),
        "in order": lambda **more: Pipeline(source, batch_size=8, pad=pad, shuffle=False, **more),
        "mixed": lambda **more: Pipeline(
            MixSource([source, source], [3, 1]), batch_size=8, pad=pad, seed=1, **more
        ),
        "transformed": lambda **more: Pipeline(
            source, batch_size=8, pad=pad, transform=disturb, seed=7, **more
        ),
        "buckets": lambda **more: Pipeline(
            source,
            batch_size=8,
            buckets=Buckets(lengths, [3, 7]),
            pad={"words": Pad()},
            seed=7,
            **more,
        ),
        "mapped": lambda **more: Pipeline(
            MapSource(source, only_numbers), batch_size=8, seed=3, **more
        ),
    }


KINDS = ("plain", "in order", "mixed", "transformed", "buckets", "mapped")


def disturb(example, rng):
    return example | {"floats": example["floats"] + rng.normal(size=3).astype(np.float32)}


def only_numbers(batch):
    return {"n": batch["n"]}


def check_equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_interrupted_anywhere_goes_on_with_the_same_batches(pattern, kind):
    make = pipelines(pattern)[kind]
    steps = 60
    whole = [make().batch(step) for step in range(steps)]
    rng = np.random.default_rng(0)
    step = 0
    while step < steps:  # as a process that is started again would: with sources of its own
        batches = feed(pipelines(pattern)[kind](), start=step)
        for _ in range(int(rng.integers(1, 20))):
            if step < steps:
                check_equal(next(batches), whole[step])
                step += 1
        batches.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 4])
def test_processes_see_slices_of_the_same_global_batches(pattern, kind, count):
    make = pipelines(pattern)[kind]
    whole = make()
    parts = [make(shard_index=index, shard_count=count) for index in range(count)]
    for step in (0, 1, 11, 12, 13, 250):
        shares = [part.batch(step) for part in parts]
        joined = {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}
        check_equal(joined, whole.batch(step))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(start=st.integers(0, 100), count=st.integers(1, 20))
def test_batches_do_not_depend_on_what_they_were_read_with(tmp_path_factory, kind, start, count):
    folder = tmp_path_factory.getbasetemp() / f"company-{kind}"
    if not folder.exists():
        write(folder / "train.tfrecord", shard_records=30)
    pipeline = pipelines(str(folder / "train-*.tfrecord"))[kind]()
    for step, batch in enumerate(pipeline.split(start, count), start):
        check_equal(batch, pipeline.batch(step))


@pytest.mark.parametrize("options", [{"threads": 3}, {"workers": 2}])
def test_threads_and_workers_read_the_same(pattern, options):
    make = pipelines(pattern)["transformed"]
    batches = feed(make(**options), start=3)
    for step in range(3, 40):
        check_equal(next(batches), make().batch(step))
    batches.close()


def test_array_records_are_read_the_same(tmp_path, shards):
    module = pytest.importorskip("array_record.python.array_record_module")
    for part in range(2):
        writer = module.ArrayRecordWriter(str(tmp_path / f"part{part}.arrayrecord"), "group_size:1")
        for number in range(50 * part, 50 * part + 50):
            writer.write(example(number))
        writer.close()
    ours = ArrayRecordSource(str(tmp_path / "*.arrayrecord"), SPEC)
    assert len(ours) == 100
    assert ours.where(51).endswith("part1.arrayrecord: record 1")
    indices = np.array([99, 0, 50, 49, 50])
    theirs = RecordSource(shards, SPEC).read(indices)
    for name, column in ours.read(indices).items():
        assert [np.asarray(row).tolist() for row in column] == [
            np.asarray(row).tolist() for row in theirs[name]
        ]
    again = pickle.loads(pickle.dumps(ours))  # as workers are sent it
    assert again.read(indices)["n"].tolist() == indices.tolist()


def test_what_is_no_array_record_is_told(tmp_path):
    pytest.importorskip("array_record")
    (tmp_path / "x.arrayrecord").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"x\.arrayrecord cannot be read as an ArrayRecord file"):
        ArrayRecordSource(tmp_path / "x.arrayrecord")
