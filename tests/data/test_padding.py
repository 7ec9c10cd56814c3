import numpy as np
import pytest

from ftrain.data import Pad
from ftrain.data.padding import pad_batch
from ftrain.data.source import to_rows

ROWS = to_rows([np.array([1, 2, 3]), np.array([4]), np.array([], np.int64)])


def test_rows_are_filled_up_to_the_longest_to_a_multiple_or_to_a_length():
    assert pad_batch({"x": ROWS}, {"x": Pad()})["x"].tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    assert pad_batch({"x": ROWS}, {"x": Pad(multiple=4)})["x"].shape == (3, 4)
    assert pad_batch({"x": ROWS}, {"x": Pad()}, bucket=5)["x"].shape == (3, 5)
    padded = pad_batch({"x": ROWS}, {"x": Pad(2, value=-1, truncate=True, lengths="n")})
    assert padded["x"].tolist() == [[1, 2], [4, -1], [-1, -1]]
    assert padded["n"].tolist() == [2, 1, 0]
    assert padded["n"].dtype == np.int32


def test_rows_may_have_more_axes_and_be_equal_in_length():
    rows = to_rows([np.ones((2, 3)), np.ones((1, 3))])
    assert pad_batch({"x": rows}, {"x": Pad(4)})["x"].shape == (2, 4, 3)
    assert pad_batch({"x": np.ones((2, 3))}, {"x": Pad(4)})["x"].sum() == 6


def test_texts_are_padded_too():
    rows = to_rows([np.array([b"a", b"b"], object), np.array([b"c"], object)])
    assert pad_batch({"x": rows}, {"x": Pad(value=b"")})["x"].tolist() == [[b"a", b"b"], [b"c", b""]]


@pytest.mark.parametrize(
    ("batch", "pad", "message"),
    [
        ({"x": ROWS}, Pad(2), "feature x has 3 values, wanted at most 2; truncate=True would cut it"),
        ({"y": ROWS}, Pad(), "there is no feature x to pad; there are y"),
        ({"x": np.arange(3)}, Pad(), "feature x has no length to pad: it holds single values"),
        ({"x": to_rows([np.ones((1, 2)), np.ones((2, 3))])}, Pad(), "feature x has values of several shapes"),
    ],
)
def test_what_cannot_be_padded_is_named(batch, pad, message):
    with pytest.raises(ValueError, match=message):
        pad_batch(batch, {"x": pad})
