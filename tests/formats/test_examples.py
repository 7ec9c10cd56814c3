import contextlib
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.formats.examples.messages import (
    BytesList,
    Example,
    Feature,
    FeatureList,
    FeatureLists,
    Features,
    FloatList,
    Int64List,
    SequenceExample,
    decode_example,
    decode_sequence_example,
    encode_example,
    encode_sequence_example,
)

VALUES = st.one_of(
    st.none(),
    st.lists(st.floats(width=32), min_size=1, max_size=5),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    st.lists(st.binary(max_size=5), min_size=1, max_size=5),
)
FEATURES = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


def check(ours, wanted):
    assert (ours is None) == (wanted is None)
    if wanted is not None:
        np.testing.assert_array_equal(ours, np.array(wanted, ours.dtype))


@given(FEATURES)
def test_what_is_encoded_is_decoded(features):
    decoded = decode_example(encode_example(features))
    assert decoded.keys() == features.keys()
    for name, wanted in features.items():
        check(decoded[name], wanted)


@given(FEATURES, st.dictionaries(st.text(max_size=5), st.lists(VALUES, max_size=3), max_size=3))
def test_what_is_encoded_as_a_sequence_is_decoded(context, lists):
    decoded, decoded_lists = decode_sequence_example(encode_sequence_example(context, lists))
    assert decoded.keys() == context.keys()
    assert decoded_lists.keys() == lists.keys()
    for name, wanted in context.items():
        check(decoded[name], wanted)
    for name, steps in lists.items():
        for ours, wanted in zip(decoded_lists[name], steps, strict=True):
            check(ours, wanted)


@given(FEATURES)
def test_the_order_of_features_does_not_matter(features):
    assert encode_example(features) == encode_example(dict(reversed(features.items())))


@pytest.mark.parametrize(
    ("value", "wanted", "dtype"),
    [
        (3, [3], np.int64),
        (3.0, [3], np.float32),
        (b"a\0", [b"a\0"], object),
        (bytearray(b"ab"), [b"ab"], object),
        pytest.param(memoryview(b"ab"), [b"ab"], object, id="memoryview"),
        (np.float64(0.1), [np.float32(0.1)], np.float32),
        (1e40, [math.inf], np.float32),
        ([1, 2.5], [1, 2.5], np.float32),
        (np.arange(6).reshape(2, 3).T, [0, 3, 1, 4, 2, 5], np.int64),
        ([[1, 2], [3, 4]], [1, 2, 3, 4], np.int64),
        (np.array([1, 255], np.uint8), [1, 255], np.int64),
        (np.array([1.5, -2], ml_dtypes.bfloat16), [1.5, -2], np.float32),
        (np.array([1, -2], ml_dtypes.int4), [1, -2], np.int64),
        (np.array([1.5], np.float16), [1.5], np.float32),
        (np.array([b"ab", b"c"]), [b"ab", b"c"], object),
        (np.array([[b"a\0"], [b""]], object), [b"a\0", b""], object),
        ([[b"a\0"], [b"b"]], [b"a\0", b"b"], object),
        (np.array([1, 2], object), [1, 2], np.int64),
        ((np.int8(3), 4), [3, 4], np.int64),
        (np.array([], np.float32), [], np.float32),
        (np.array([], np.int8), [], np.int64),
        (np.array([], "S"), [], object),
    ],
    ids=str,
)
def test_the_kind_follows_from_the_value(value, wanted, dtype):
    decoded = decode_example(encode_example({"v": value}))["v"]
    assert decoded is not None
    assert decoded.dtype == dtype
    assert decoded.tolist() == np.array(wanted, dtype).tolist()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (True, TypeError, r"feature v is bool, expected .*; convert it with \.astype\(int\)"),
        (np.array([True]), TypeError, r"feature v is bool"),
        ([1, True], TypeError, r"feature v is bool"),
        ("text", TypeError, r"feature v is str, expected .*; convert it with \.encode\(\)"),
        (["a"], TypeError, r"feature v is str"),
        (np.array([], "U"), TypeError, r"feature v is str"),
        (np.array([], bool), TypeError, r"feature v is bool"),
        ([], TypeError, r"feature v is an empty list.*pass np\.array\(\[\], np\.float32\)"),
        ([1, None], TypeError, r"feature v has values of type NoneType and int"),
        ([b"a", 1], TypeError, r"feature v has values of type bytes and int"),
        ([[1], [2, 3]], TypeError, r"feature v has values of type list"),
        (
            [np.zeros((2, 3)), np.zeros((2, 4))],
            TypeError,
            r"feature v has values that do not fit together",
        ),
        ({"a": 1}, TypeError, r"feature v has values of type dict"),
        (1j, TypeError, r"feature v is complex128"),
        (np.datetime64("2020"), TypeError, r"feature v is datetime64"),
        (2**63, ValueError, r"feature v has the value 9223372036854775808, expected"),
        ([1, 2**63], ValueError, r"feature v has the value 9223372036854775808"),
        (-(2**63) - 1, ValueError, r"feature v has the value -9223372036854775809"),
        (
            np.array([2**64 - 1], np.uint64),
            ValueError,
            r"feature v has the value 18446744073709551615",
        ),
        ([10**400, 0.5], ValueError, r"feature v has an integer that is too large"),
    ],
    ids=str,
)
def test_other_values_are_refused_by_name(value, error, message):
    with pytest.raises(error, match=message):
        encode_example({"v": value})


def test_names_are_text():
    with pytest.raises(TypeError, match=r"feature name 3 is a int, expected a str"):
        encode_example({3: 1})  # pyright: ignore[reportArgumentType] - the case
    with pytest.raises(ValueError, match=r"feature name .* is not Unicode text"):
        encode_example({"\ud800": 1})


def test_a_step_is_named_in_errors():
    with pytest.raises(TypeError, match=r"step 1 of feature list words is str"):
        encode_sequence_example({}, {"words": [b"a", "b"]})


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_garbage_is_a_clean_error(data):
    for decode in (decode_example, decode_sequence_example):
        with contextlib.suppress(ValueError):
            decode(data)


@pytest.mark.parametrize(
    "data",
    [b"\x0b" * 100_000, b"\x0a" + b"\xff" * 8 + b"\x0f", b"\x0a\xff\xff\xff\xff\x07", b"\x0a"],
)
def test_deep_and_long_garbage_is_a_clean_error(data):
    with pytest.raises(ValueError, match=rf"its {len(data)} bytes are not a valid Example"):
        decode_example(data)
    with pytest.raises(ValueError, match=rf"its {len(data)} bytes are not a valid SequenceExample"):
        decode_sequence_example(data)


def test_every_cut_is_a_clean_error():
    data = encode_example({"x": [1.5, 2.5], "y": [1, 300], "z": b"abc"})
    for size in range(1, len(data)):
        with pytest.raises(ValueError, match=rf"its {size} bytes are not a valid Example"):
            decode_example(data[:size])


def test_messages_are_real_ones():
    feature = Feature(int64_list=Int64List(value=[1, 2]))
    assert feature.WhichOneof("kind") == "int64_list"
    example = Example(
        features=Features(feature={"a": feature, "b": Feature(float_list=FloatList(value=[0.5]))})
    )
    assert encode_example({"a": [1, 2], "b": 0.5}) == example.SerializeToString(deterministic=True)
    steps = FeatureList(feature=[Feature(bytes_list=BytesList(value=[b"x"]))])
    sequence = SequenceExample(
        context=Features(), feature_lists=FeatureLists(feature_list={"s": steps})
    )
    assert encode_sequence_example({}, {"s": [b"x"]}) == sequence.SerializeToString(
        deterministic=True
    )
    assert Example.DESCRIPTOR.full_name == "tensorflow.Example"


def test_decoded_arrays_can_be_written_to():
    decoded = decode_example(encode_example({"x": [1.5, 2.5]}))["x"]
    assert decoded is not None
    decoded += 1
    assert decoded.tolist() == [2.5, 3.5]
