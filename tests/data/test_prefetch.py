import itertools
import threading

import numpy as np
import pytest

from ftrain.data import ArraySource, Pipeline, Prefetcher, feed

pytestmark = pytest.mark.usefixtures("no_thread_left")


def test_a_pipeline_is_fed_from_the_step_asked_for(pipeline):
    batches = feed(pipeline, start=13)
    for step in range(13, 60):
        np.testing.assert_array_equal(next(batches)["x"], pipeline.batch(step)["x"])
    batches.close()


def test_a_plain_iterable_is_fed_to_its_end():
    batches = feed([1, 2, 3])
    assert list(batches) == [1, 2, 3]
    assert list(batches) == []
    batches.close()


def test_an_error_arrives_after_the_batches_before_it():
    def broken():
        yield 1
        raise OSError("disk on fire")

    batches = feed(broken())
    assert next(batches) == 1
    with pytest.raises(OSError, match="disk on fire"):
        next(batches)
    batches.close()


def test_it_runs_ahead_but_not_without_bound():
    made = []
    enough = threading.Event()

    def count():
        for number in itertools.count():
            made.append(number)
            if number == 3:
                enough.set()
            yield [number]

    batches = Prefetcher(count(), depth=4)
    assert enough.wait(10)  # four wait to be taken
    assert next(batches) == 0
    assert made == [0, 1, 2, 3]  # no more are made until half of them are used up
    assert next(batches) == 1
    assert next(batches) == 2
    batches.close()
    assert len(made) <= 8


def test_only_two_large_batches_wait():
    made = []
    third = threading.Event()

    def large():
        for number in itertools.count():
            made.append(number)
            yield [np.zeros(9 << 20, np.float32)]
            if number == 2:
                third.set()

    batches = Prefetcher(large(), depth=9)
    assert not third.wait(0.5)
    batches.close()
    assert len(made) == 2


def test_large_batches_are_not_read_many_at_a_time():
    reads = []

    class Watched(ArraySource):
        def read(self, indices):
            reads.append(len(indices))
            return super().read(indices)

    pipeline = Pipeline(Watched({"x": np.zeros((4, 300_000), np.float32)}), batch_size=2)
    batches = feed(pipeline)
    next(batches)
    batches.close()
    assert max(reads) == 2


def test_a_dict_of_arrays_is_not_a_stream_of_batches():
    with pytest.raises(TypeError, match=r"use Pipeline\(ArraySource\(data\), batch_size="):
        feed({"x": np.zeros(3)})
