import numpy as np
import pytest

from ftrain.data import Pad
from ftrain.data.batching import pad_batch
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


def test_empty_rows_take_the_form_of_the_others():
    rows = to_rows([np.zeros((0, 3), np.float32)] * 2 + [np.zeros(0)])
    assert pad_batch({"x": rows}, {"x": Pad(4)})["x"].shape == (3, 4, 3)
    rows = to_rows([np.ones((2, 3), np.float32), np.zeros(0)])
    padded = pad_batch({"x": rows}, {"x": Pad(4)})["x"]
    assert padded.shape == (2, 4, 3)
    assert padded.dtype == np.float32


def test_texts_are_padded_too():
    rows = to_rows([np.array([b"a", b"b"], object), np.array([b"c"], object)])
    assert pad_batch({"x": rows}, {"x": Pad(value=b"")})["x"].tolist() == [
        [b"a", b"b"],
        [b"c", b""],
    ]
    assert pad_batch({"x": rows}, {"x": Pad(value=b"p\0")})["x"].tolist() == [
        [b"a", b"b"],
        [b"c", b"p\0"],
    ]


@pytest.mark.parametrize(
    ("batch", "pad", "message"),
    [
        (
            {"x": ROWS},
            Pad(2),
            r"row 0: x has 3 values, expected at most 2; Pad\(truncate=True\) cuts it",
        ),
        ({"x": ROWS}, Pad(value=1.5), r"x holds int64, which cannot be padded with 1\.5"),
        (
            {"x": ROWS, "n": ROWS},
            Pad(lengths="n"),
            "the lengths of x would replace the feature n",
        ),
        ({"y": ROWS}, Pad(), "no feature x to pad; the features are y"),
        ({"x": np.arange(3)}, Pad(), "feature x has no length to pad: it holds single values"),
        (
            {"x": to_rows([np.ones((1, 2)), np.ones((2, 3))])},
            Pad(),
            r"feature x must have values of one shape, got \(2,\), \(3,\)",
        ),
    ],
)
def test_what_cannot_be_padded_is_named(batch, pad, message):
    with pytest.raises(ValueError, match=message):
        pad_batch(batch, {"x": pad})
