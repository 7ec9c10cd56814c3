import numpy as np
import pytest

from ftrain.data import ArraySource, WindowSource


def test_arrays_are_read_by_whole_batches_of_indices():
    source = ArraySource({"x": np.arange(12).reshape(6, 2), "y": np.arange(6)})
    batch = source.read(np.array([4, 0, 4]))
    assert len(source) == 6
    np.testing.assert_array_equal(batch["x"], [[8, 9], [0, 1], [8, 9]])
    np.testing.assert_array_equal(batch["y"], [4, 0, 4])


def test_arrays_that_are_views_are_read_alike():
    array = np.arange(24).reshape(6, 4)[:, ::2]
    np.testing.assert_array_equal(
        ArraySource({"x": array}).read(np.array([5, 1]))["x"], array[[5, 1]]
    )


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "at least one array"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "same number of examples, got {'x': 3, 'y': 4}"),
        ({"x": np.float32(1)}, "array x is a scalar"),
    ],
)
def test_arrays_that_cannot_be_examples_are_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        ArraySource(arrays)


def test_windows_of_a_sequence():
    source = WindowSource(np.arange(10), 4, stride=3)
    assert len(source) == 3
    np.testing.assert_array_equal(
        source.read(np.array([0, 2]))["tokens"], [[0, 1, 2, 3], [6, 7, 8, 9]]
    )


def test_a_window_longer_than_the_sequence_is_refused():
    with pytest.raises(ValueError, match="a window of 5 is longer than the sequence of 4"):
        WindowSource(np.arange(4), 5)
