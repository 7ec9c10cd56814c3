"""What took the place of each function of queue input: the same job, done."""

import inspect

import numpy as np
import pytest

from ftrain.coordination import EndOfData
from ftrain.data import (
    ArraySource,
    ConcatSource,
    FilterSource,
    MixSource,
    Pad,
    Pipeline,
    RangeSource,
    Stream,
    TextSource,
    feed,
)
from ftrain.formats import match_files
from ftrain.migration import TABLE, resolve

NUMBERS = np.arange(10)


def source(start: int = 0, count: int = 10) -> ArraySource:
    return ArraySource({"n": np.arange(start, start + count)})


def is_even(batch):
    return batch["n"] % 2 == 0


def numbers(data) -> list[list[int]]:
    return [batch["n"].tolist() for batch in feed(data)]


def batch(tmp_path):
    assert numbers(Pipeline(source(), batch_size=4, shuffle=False, epochs=1)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    kept = Pipeline(source(), batch_size=4, shuffle=False, epochs=1, last="keep")
    assert numbers(kept)[-1] == [8, 9]  # allow_smaller_final_batch
    rows = ({"row": np.arange(n)} for n in (1, 3))
    assert next(iter(Stream(rows, batch_size=2, pad={"row": Pad()})))["row"].tolist() == [
        [0, 0, 0],
        [0, 1, 2],
    ]


def shuffle_batch(tmp_path):
    first, second = (
        Pipeline(source(), batch_size=10, seed=seed).batch(0)["n"].tolist() for seed in (1, 2)
    )
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def batch_join(tmp_path):
    both = ConcatSource([source(0, 3), source(100, 3)])
    assert numbers(Pipeline(both, batch_size=3, shuffle=False, epochs=1)) == [
        [0, 1, 2],
        [100, 101, 102],
    ]


def shuffle_batch_join(tmp_path):
    both = MixSource([source(0, 30), source(100, 30)], [1, 1])
    drawn = np.concatenate(numbers(Pipeline(both, batch_size=10, epochs=10)))
    assert 200 < np.sum(drawn < 100) < 400


def maybe_batch(tmp_path):
    assert numbers(
        Pipeline(FilterSource(source(), is_even), batch_size=5, shuffle=False, epochs=1)
    ) == [[0, 2, 4, 6, 8]]


def maybe_batch_join(tmp_path):
    both = ConcatSource([FilterSource(source(), is_even), FilterSource(source(100, 4), is_even)])
    assert numbers(Pipeline(both, batch_size=7, shuffle=False, epochs=1)) == [
        [0, 2, 4, 6, 8, 100, 102]
    ]


def maybe_shuffle_batch(tmp_path):
    (drawn,) = numbers(Pipeline(FilterSource(source(), is_even), batch_size=5, epochs=1))
    assert sorted(drawn) == [0, 2, 4, 6, 8]


def maybe_shuffle_batch_join(tmp_path):
    both = ConcatSource([FilterSource(source(), is_even), FilterSource(source(100, 4), is_even)])
    (drawn,) = numbers(Pipeline(both, batch_size=7, epochs=1))
    assert sorted(drawn) == [0, 2, 4, 6, 8, 100, 102]


def input_producer(tmp_path):
    endless = Pipeline(source(), batch_size=10)
    assert sorted(endless.batch(0)["n"]) == sorted(endless.batch(999)["n"]) == NUMBERS.tolist()


def range_input_producer(tmp_path):
    assert Pipeline(RangeSource(6), batch_size=3, shuffle=False).batch(1)["index"].tolist() == [
        3,
        4,
        5,
    ]


def slice_input_producer(tmp_path):
    rows = ArraySource({"image": np.arange(6).reshape(3, 2), "label": np.arange(3)})
    made = Pipeline(rows, batch_size=3).batch(0)
    np.testing.assert_array_equal(made["image"][:, 0], 2 * made["label"])


def string_input_producer(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("three\n")
    lines = Pipeline(TextSource(str(tmp_path / "*.txt")), batch_size=3, shuffle=False).batch(0)[
        "text"
    ]
    assert lines.tolist() == ["one", "two", "three"]
    names = Pipeline(ArraySource({"name": np.array(["a", "b"])}), batch_size=2).batch(0)["name"]
    assert sorted(names.tolist()) == ["a", "b"]


def limit_epochs(tmp_path):
    data = Pipeline(source(), batch_size=5, epochs=2)
    assert len(numbers(data)) == 4
    with pytest.raises(EndOfData):
        data.batch(4)


def match_filenames_once(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.tfrecord").touch()
    assert [path.name for path in match_files(str(tmp_path / "*.tfrecord"))] == [
        "a.tfrecord",
        "b.tfrecord",
    ]


JOBS = [
    batch,
    batch_join,
    shuffle_batch,
    shuffle_batch_join,
    maybe_batch,
    maybe_batch_join,
    maybe_shuffle_batch,
    maybe_shuffle_batch_join,
    input_producer,
    range_input_producer,
    slice_input_producer,
    string_input_producer,
    limit_epochs,
    match_filenames_once,
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_the_job_of_a_queue_is_done(job, tmp_path):
    job(tmp_path)
    counterparts = [resolve(name).__name__ for name in TABLE[f"tf.train.{job.__name__}"].ours]
    assert counterparts[0] in inspect.getsource(job) or counterparts[-1] in inspect.getsource(job)
