import itertools

import numpy as np
import pytest

from ftrain.data import Pad, Stream


def examples(count: int):
    return ({"n": number, "row": np.arange(number % 3)} for number in range(count))


def test_examples_are_batched_in_order():
    batches = list(Stream(examples(10), batch_size=4, pad={"row": Pad(2)}))
    assert [batch["n"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches[0]["row"].shape == (4, 2)
    kept = list(Stream(examples(10), batch_size=4, last="keep"))
    assert kept[-1]["n"].tolist() == [8, 9]


def test_a_buffer_shuffles_and_loses_nothing():
    numbers = [
        n
        for batch in Stream(examples(100), batch_size=10, shuffle_buffer=30, seed=1)
        for n in batch["n"]
    ]
    assert sorted(numbers) == list(range(100))
    assert numbers != sorted(numbers)
    again = [
        n
        for batch in Stream(examples(100), batch_size=10, shuffle_buffer=30, seed=1)
        for n in batch["n"]
    ]
    assert numbers == again


def test_an_endless_stream_is_not_read_ahead_of_its_buffer():
    taken = itertools.count()
    stream = iter(Stream(({"n": n} for n in taken), batch_size=2, shuffle_buffer=5))
    next(stream)
    assert next(taken) <= 8


def test_examples_must_be_alike():
    mixed = iter([{"a": 1}, {"b": 2}])
    with pytest.raises(
        ValueError,
        match="the stream returned an example with features b, expected a as in the first",
    ):
        list(Stream(mixed, batch_size=2))


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="batch_size must be >= 1"):
        Stream(examples(3), batch_size=0)
    with pytest.raises(ValueError, match="last must be"):
        Stream(examples(3), batch_size=1, last="pad")
