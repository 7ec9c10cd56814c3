import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data import ArraySource, Pipeline


def numbers(count: int) -> ArraySource:
    return ArraySource({"n": np.arange(count)})


def make(count: int, batch_size: int, **options) -> Pipeline:
    return Pipeline(numbers(count), batch_size=batch_size, **options)


@given(st.integers(1, 40), st.data())
def test_every_epoch_sees_every_example_once(count, data):
    batch_size = data.draw(st.integers(1, count))
    pipeline = make(count, batch_size, seed=data.draw(st.integers(0, 9)))
    steps = -(-3 * count // batch_size)
    seen = np.concatenate([pipeline.batch(step)["n"] for step in range(steps)])
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_a_batch_is_a_function_of_seed_and_step_alone():
    first, second = make(100, 8, seed=1), make(100, 8, seed=1)
    ahead = first.batch(57)
    for step in reversed(range(58)):
        second.batch(step)
    np.testing.assert_array_equal(ahead["n"], second.batch(57)["n"])
    assert not np.array_equal(ahead["n"], make(100, 8, seed=2).batch(57)["n"])


def test_epochs_differ_and_order_is_kept_if_asked():
    pipeline = make(64, 64)
    assert not np.array_equal(pipeline.batch(0)["n"], pipeline.batch(1)["n"])
    np.testing.assert_array_equal(make(5, 3, shuffle=False).batch(1)["n"], [3, 4, 0])


@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 20))
def test_processes_share_the_same_global_batch(shard_count, step):
    whole = make(30, 12, seed=5).batch(step)["n"]
    parts = [
        make(30, 12, seed=5, shard_index=index, shard_count=shard_count).batch(step)["n"]
        for index in range(shard_count)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@given(st.integers(0, 30), st.integers(1, 9), st.sampled_from([1, 2]))
def test_several_batches_at_once_are_the_same(start, count, shard_count):
    pipeline = make(21, 8, seed=2, shard_index=shard_count - 1, shard_count=shard_count)
    several = pipeline.batches(start, count)["n"]
    assert len(several) == count
    for step, batch in enumerate(several, start):
        np.testing.assert_array_equal(batch, pipeline.batch(step)["n"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"batch_size": 11}, "batch_size 11 is larger than the data, which has 10 examples"),
        ({"batch_size": 5, "shard_count": 2}, "batch_size 5 does not divide over 2 processes"),
        (
            {"batch_size": 4, "shard_index": 2, "shard_count": 2},
            r"shard_index must be in \[0, 2\), got 2",
        ),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(numbers(10), **options)
