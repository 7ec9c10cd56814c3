import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.coordination import EndOfData
from ftrain.data import (
    ArraySource,
    Buckets,
    MapSource,
    Pad,
    Pipeline,
    RangeSource,
    example_lengths,
    feed,
)


def numbers(count: int) -> ArraySource:
    return ArraySource({"n": np.arange(count)})


def sentences(count: int = 200) -> MapSource:
    """Example n has n % 13 + 1 words, all of them n."""
    return MapSource(RangeSource(count), write, each=True)


def write(example):
    index = example["index"]
    return {"words": np.full(index % 13 + 1, index), "n": index}


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_data_end_after_their_epochs(count, epochs, data):
    size = data.draw(st.integers(1, count))
    dropped = Pipeline(numbers(count), batch_size=size, epochs=epochs)
    kept = Pipeline(numbers(count), batch_size=size, epochs=epochs, last="keep")
    assert dropped.steps == epochs * count // size
    whole = np.concatenate([batch["n"] for batch in feed(kept)])
    assert np.bincount(whole).tolist() == [epochs] * count
    assert len(list(feed(dropped))) == dropped.steps
    with pytest.raises(EndOfData, match=f"the data end after {kept.steps} batches"):
        kept.batch(kept.steps)


def test_feeding_begins_and_ends_where_it_should():
    pipeline = Pipeline(numbers(100), batch_size=8, epochs=2, last="keep")
    sizes = [len(batch["n"]) for batch in feed(pipeline, start=20)]
    assert sizes == [8, 8, 8, 8, 8]
    assert [
        len(batch["n"])
        for batch in feed(Pipeline(numbers(99), batch_size=8, epochs=1, last="keep"), 11)
    ] == [8, 3]
    assert list(feed(pipeline, start=25)) == []
    assert list(feed(pipeline, start=99)) == []


def test_batches_of_a_bucket_are_alike_in_length():
    source = sentences()
    lengths = example_lengths(source, "words")
    buckets = Buckets(lengths, [4, 8, 13])
    pipeline = Pipeline(
        source,
        batch_size=8,
        buckets=buckets,
        pad={"words": Pad(value=-1, lengths="length")},
        epochs=3,
    )
    least = {4: 1, 8: 5, 13: 9}
    shapes = set()
    for batch in feed(pipeline):
        boundary = batch["words"].shape[1]
        shapes.add(batch["words"].shape)
        assert batch["length"].min() >= least[boundary]
        for row, length, number in zip(batch["words"], batch["length"], batch["n"], strict=True):
            assert row.tolist() == [number] * length + [-1] * (boundary - length)
    assert shapes == {(8, 4), (8, 8), (8, 13)}


def test_buckets_see_each_example_once_an_epoch_and_lose_none():
    source = sentences()
    buckets = Buckets(example_lengths(source, "words"), [4, 8, 13], batch_sizes=[16, 8, 4])

    def seen(last):
        made = Pipeline(
            source, batch_size=1, buckets=buckets, pad={"words": Pad()}, last=last, epochs=3, seed=9
        )
        batches = list(made)
        assert len(batches) == made.steps
        return [len(batch["n"]) for batch in batches], np.concatenate(
            [batch["n"] for batch in batches]
        )

    sizes, kept = seen("keep")
    assert np.bincount(kept).tolist() == [3] * 200
    assert sizes[-2:] == [
        3 * 61 % 8,
        3 * 75 % 4,
    ]  # what is left over of the second and the third bucket
    full, dropped = seen("drop")
    assert full == sizes[:-2]
    np.testing.assert_array_equal(dropped, kept[: len(dropped)])


def test_a_bucket_smaller_than_a_batch_is_trained_on_too():
    lengths = np.where(np.arange(103) < 3, 50, 5)  # three long ones
    data = Pipeline(numbers(103), batch_size=16, buckets=Buckets(lengths, [8, 64]))
    counts = np.bincount(np.concatenate([data.batch(step)["n"] for step in range(400)]))
    assert counts.min() >= 56  # of 400 * 16 / 103 = 62.1, and a batch has the three of them 5 times
    assert counts.max() <= 64


def test_buckets_on_several_processes_are_slices_of_the_same_batches():
    source = sentences()
    buckets = Buckets(example_lengths(source, "words"), [4, 8, 13])

    def make(**options):
        return Pipeline(
            source, batch_size=8, buckets=buckets, pad={"words": Pad()}, seed=2, **options
        )

    for step in range(30):
        whole = make().batch(step)["words"]
        parts = [make(shard_index=at, shard_count=4).batch(step)["words"] for at in range(4)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_boundaries_and_lengths_must_fit():
    lengths = np.array([1, 5, 9])
    with pytest.raises(
        ValueError,
        match="1 examples are longer than the last boundary, 8: the first is example 2 ",
    ):
        Buckets(lengths, [4, 8])
    assert [members.tolist() for members in Buckets(lengths, [4, 8], longer="drop").members()] == [
        [0],
        [1],
    ]
    with pytest.raises(ValueError, match="boundaries must be increasing"):
        Buckets(lengths, [8, 4])
    with pytest.raises(
        ValueError, match=r"buckets\.lengths must have an entry for each of the 10 examples, got 3"
    ):
        Pipeline(numbers(10), batch_size=1, buckets=Buckets(lengths, [9]))
    with pytest.raises(ValueError, match="no example fits into a bucket"):
        Pipeline(numbers(3), batch_size=4, buckets=Buckets(lengths + 9, [9], longer="drop"))
    with pytest.raises(ValueError, match=r"1 epochs of .* fill no batch"):
        Pipeline(numbers(3), batch_size=4, epochs=1, buckets=Buckets(lengths, [9]))
    with pytest.raises(ValueError, match="batch_sizes must be >= 1"):
        Buckets(lengths, [9], batch_sizes=np.array([0]))
    with pytest.raises(ValueError, match="feature n has no length: it holds single values"):
        example_lengths(numbers(3), "n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be >= 1, got 0"),
        ({"last": "fill"}, "last must be 'drop', 'keep' or 'pad', got 'fill'"),
        ({"threads": 0}, "threads must be >= 1, got 0"),
        ({"workers": -1}, "workers must be >= 0, got -1"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        (
            {"shard_count": 2, "pad": {"n": Pad()}},
            "Pad needs a length with several processes",
        ),
        (
            {"shard_count": 2, "epochs": 1, "last": "keep"},
            "makes batches that do not divide over 2 processes",
        ),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(numbers(11), batch_size=2, **options)


def test_steps_before_the_first_are_refused():
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        Pipeline(numbers(10), batch_size=2).batch(-1)
