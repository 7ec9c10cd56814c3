"""Guessed features of records; the guessed specs parse the records."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from ftrain.formats.examples.features import Fixed, Image, Ragged, Raw, Steps
from ftrain.formats.examples.guessing import guess_schema, image_shape, look_of, record_kind
from ftrain.formats.examples.messages import encode_example, encode_sequence_example
from ftrain.formats.examples.parsing import parse_examples, parse_sequence_examples

# As TensorBoard's first record: field 1 is a double, field 3 text.
EVENT = b"\x09\x00\x00\x00\x00\x00\x00\xf0\x3f\x1a\rbrain.Event:2"


def picture(mode: str, kind: str, size: tuple[int, int] = (5, 7)) -> bytes:
    file = io.BytesIO()
    Pillow.new(mode, size).save(file, kind)
    return file.getvalue()


def entry_of(*values):
    """The entry guessed from one feature; None stands for a record without it."""
    records = [
        encode_example({"other": 1} | ({} if value is None else {"x": value})) for value in values
    ]
    return guess_schema(records).spec.get("x")


@pytest.mark.parametrize(
    ("values", "entry"),
    [
        ([1.5, 2.5], Fixed((), "float32")),
        ([np.zeros(64), np.ones(64)], Fixed((64,), "float32")),
        ([3, -4], Fixed((), "int64")),
        ([[1, 2], [3, 4, 5]], Ragged("int64")),
        ([np.array([], np.float32), [1.0]], Ragged("float32")),
        ([[1, 2], None], Fixed((2,), "int64", default=0)),
        ([None, 1.0], Fixed((), "float32", default=0.0)),
        ([b"zebra", b"\xc3\xbc"], Fixed((), "bytes")),
        ([b"", b"zebra"], Fixed((), "bytes")),
        ([None, b"zebra"], Fixed((), "bytes", default=b"")),
        ([[b"a", b"b"], [b"c", b"d"]], Fixed((2,), "bytes")),
        ([[b"a", b"b"], [b"c"]], Ragged("bytes")),
        ([bytes(784), bytes(range(16)) * 49], Raw((784,), "uint8")),
        ([b"\x00\x01", b"\x00\x01\x02"], Fixed((), "bytes")),
        ([picture("L", "PNG"), picture("L", "JPEG")], Image((7, 5, 1))),
        ([picture("RGB", "JPEG")], Image((7, 5, 3))),
        ([picture("RGBA", "PNG")], Image((7, 5, 4))),
        ([picture("RGB", "PNG"), picture("RGB", "PNG", (9, 9))], Fixed((), "bytes")),
        ([picture("RGB", "PNG")[:20]], Fixed((), "bytes")),
        ([None, picture("L", "PNG")], Fixed((), "bytes", default=b"")),
        ([1, 1.5], None),
    ],
)
def test_the_entry_is_what_fits_all_records(values, entry):
    assert entry_of(*values) == entry


def test_ranges_counts_and_gaps_are_told():
    records = [
        encode_example({"x": [1.0, np.nan, -2.0], "n": 1 << 62}),
        encode_example({"n": -5, "none": None}),
    ]
    guess = guess_schema(records)
    assert guess.kind == "example"
    assert list(guess.features) == ["n", "none", "x"]
    x, n = guess.features["x"], guess.features["n"]
    assert (x.missing, x.present, x.counts, x.range, x.nonfinite) == (1, 1, (3, 3), (-2.0, 1.0), 1)
    assert (n.missing, n.range) == (0, (-5, 1 << 62))
    assert guess.features["none"].missing == 2
    assert guess.features["none"].entry is None


def test_kinds_of_records():
    example = encode_example({"x": 1})
    sequence = encode_sequence_example({"x": 1}, {"y": [1, 2]})
    assert record_kind(example) == "example"
    assert record_kind(sequence) == "sequence"
    assert record_kind(encode_sequence_example({"x": 1}, {})) == "sequence"
    assert record_kind(EVENT) == "other"
    assert record_kind(b"no message at all") == "other"
    assert guess_schema([example, sequence, EVENT]).kind == "sequence"
    assert guess_schema([example, EVENT, EVENT]).others == 2
    assert guess_schema([EVENT, EVENT]).kind == "other"
    assert guess_schema([b"", b""]).kind == "other"
    assert guess_schema([]).kind == "other"


def test_steps_of_sequences():
    lists = {
        "frames": [np.zeros(8)] * 3,
        "words": [[b"a"], [b"b", b"c"]],
        "pictures": [picture("L", "PNG")],
    }
    records = [
        encode_sequence_example({"id": 1}, lists),
        encode_sequence_example({"id": 2}, {"words": []}),
    ]
    guess = guess_schema(records)
    assert guess.spec == {"id": Fixed((), "int64")}
    assert guess.sequence_spec == {
        "frames": Steps(Fixed((8,), "float32"), length=3),
        "pictures": Steps(Fixed((), "bytes"), length=1),
        "words": Ragged("bytes"),
    }
    assert [guess.lists[name].steps for name in ("frames", "pictures", "words")] == [
        (0, 3),
        (0, 1),
        (0, 2),
    ]
    context, sequences = parse_sequence_examples(records, guess.spec, guess.sequence_spec)
    assert context["id"].tolist() == [1, 2]
    assert sequences["frames"].shape == (2, 3, 8)


FLOATS = st.floats(width=32)
VALUES = st.one_of(
    *(
        kind | st.lists(kind, min_size=1, max_size=4)
        for kind in (FLOATS, st.integers(-(1 << 63), (1 << 63) - 1))
    )
)
BYTES = st.binary(max_size=5) | st.lists(st.binary(max_size=5), min_size=1, max_size=3)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), VALUES | BYTES), min_size=1, max_size=20))
def test_a_guessed_spec_parses_the_records(rows):
    records = [encode_example(row) for row in rows]
    guess = guess_schema(records)
    arrays = parse_examples(records, guess.spec)
    assert set(arrays) == set(guess.spec)
    assert all(len(array) == len(records) for array in arrays.values())


@given(st.binary(max_size=60), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"]))
def test_any_bytes_have_a_look(data, head):
    assert look_of(head + data) in ("PNG", "JPEG", "text", "raw", "")
    shape = image_shape(head + data)
    assert shape is None or all(shape)
    assert guess_schema([data]).records == 1
