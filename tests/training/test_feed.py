"""The feed: pieces of the length that the loop asks for, whatever was read ahead."""

import itertools

import numpy as np
import pytest
from regression import make_arrays

from ftrain.coordination import Coordinator
from ftrain.data import ArraySource, MapSource, Pipeline
from ftrain.training import every
from ftrain.training.feed import FINISHED, Feed
from ftrain.training.stopping import Stopping

pytestmark = pytest.mark.usefixtures("no_thread_left")


def start(data, *, length=1, triggers=()):
    """A feed whose thread makes pieces of `length` steps, on the host."""
    stopping = Stopping(Coordinator(), None)
    feed = Feed(data, lambda batch, count: batch, None, None, None, stopping)
    feed.start(0, triggers, lambda: length)
    return feed


def rows_of(piece):
    return [batch.batch["x"] for batch in piece.split()]


def test_batches_read_one_by_one_are_stacked_once_steps_are_fused():
    data = Pipeline(ArraySource(make_arrays()), batch_size=4)
    feed = start(data)
    pieces = [feed.take(0, 10, 0), feed.take(1, 10, 0, 5), feed.take(6, 3, 0, 5)]
    feed.close()
    assert [piece.count for piece in pieces] == [1, 5, 1]  # three steps are fewer than five
    found = list(itertools.chain.from_iterable(map(rows_of, pieces)))
    np.testing.assert_array_equal(found, [data.batch(step)["x"] for step in range(7)])


def test_pieces_of_another_length_are_kept():
    """After single steps come pieces of four: only they are left, and they are not taken apart."""
    data = Pipeline(ArraySource(make_arrays()), batch_size=4)
    lengths = itertools.chain([1, 1], itertools.repeat(4))
    stopping = Stopping(Coordinator(), None)
    feed = Feed(data, lambda batch, count: batch, None, None, None, stopping)
    feed.start(0, [every(steps=2)], lambda: next(lengths))
    pieces = []
    step = 0
    while step < 8:
        pieces.append(feed.take(step, 8, 0, 4))
        step += pieces[-1].count
    feed.close()
    found = list(itertools.chain.from_iterable(map(rows_of, pieces)))
    np.testing.assert_array_equal(found, [data.batch(each)["x"] for each in range(step)])


def test_the_last_batches_come_one_by_one_before_the_end():
    data = Pipeline(ArraySource(make_arrays()), batch_size=4, epochs=1)
    feed = start(data)
    found = rows_of(feed.take(0, 100, 0, 1))
    while len(found) < data.steps:
        found += rows_of(feed.take(len(found), 100, 0, 7))
    with pytest.raises(FINISHED):
        feed.take(len(found), 100, 0, 7)
    feed.close()
    np.testing.assert_array_equal(found, [data.batch(step)["x"] for step in range(data.steps)])


def test_an_error_of_the_source_comes_after_the_batches_before_it():
    def fail(batch):
        if (batch["y"] == 17).any():
            raise OSError("unplugged")
        return batch

    arrays = {"y": np.arange(40)}
    data = Pipeline(MapSource(ArraySource(arrays), fail), batch_size=4, shuffle=False)
    feed = start(data)
    counts = [feed.take(0, 100, 0, 3).count, feed.take(3, 100, 0, 3).count]
    assert counts == [3, 1]  # the fifth batch has the number 17
    with pytest.raises(OSError, match="unplugged"):
        feed.take(4, 100, 0, 3)
    feed.close()
