"""Examples against bytes that the reference implementation wrote."""

import base64

import numpy as np
import pytest
from references import cases

from ftrain.formats.examples import messages
from ftrain.formats.examples.features import Ragged
from ftrain.formats.examples.messages import (
    decode_example,
    decode_sequence_example,
    encode_example,
    encode_sequence_example,
)
from ftrain.formats.examples.parsing import parse_examples, parse_sequence_examples

pytestmark = pytest.mark.reference
CASES = cases("example_protos")
EXAMPLES = [case for case in CASES if case["proto"] == "tf.train.Example"]
SEQUENCES = [case for case in CASES if case["proto"] == "tf.train.SequenceExample"]
DTYPES = {"float": "float32", "int64": "int64", "bytes": "bytes"}
VALUES = {
    "Int64List of a float": None,  # a float here is a list of floats
    "Int64List of 2**63": 2**63,
    "Int64List of a bool": True,
    "FloatList of an int": np.float32(3),
    "FloatList of 1e40": 1e40,
    "BytesList of str": "text",
    "BytesList of int": None,  # an int here is a list of integers
}


def note(case):
    return case["note"]


def array(feature):
    kind, values = feature["kind"], feature["values"]
    if kind == "bytes":
        return np.array([base64.b64decode(value) for value in values], object)
    return None if kind is None else np.array(values, DTYPES[kind])


def arrays(features):
    return {name: array(feature) for name, feature in features.items()}


def check(ours, wanted):
    if wanted is None:
        assert ours is None
    else:
        assert ours.dtype == wanted.dtype
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("case", EXAMPLES, ids=note)
def test_examples(case):
    data = base64.b64decode(case["serialized"])
    features = arrays(case["features"])
    assert encode_example(features) == data
    decoded = decode_example(data)
    assert decoded.keys() == features.keys()
    for name, wanted in features.items():
        check(decoded[name], wanted)


@pytest.mark.parametrize("copies", [1, 40])
@pytest.mark.parametrize("case", EXAMPLES, ids=note)
def test_parsed_examples(case, copies):
    data = base64.b64decode(case["serialized"])
    spec = {
        name: Ragged(DTYPES[feature["kind"] or "float"])
        for name, feature in case["features"].items()
    }
    parsed = parse_examples([data] * copies, spec)
    for name, wanted in arrays(case["features"]).items():
        for values in parsed[name]:
            check(values, np.array([], np.float32) if wanted is None else wanted)


@pytest.mark.parametrize("case", SEQUENCES, ids=note)
def test_sequence_examples(case):
    data = base64.b64decode(case["serialized"])
    context = arrays(case["context"])
    lists = {name: [array(step) for step in steps] for name, steps in case["feature_lists"].items()}
    assert encode_sequence_example(context, lists) == data
    decoded_context, decoded_lists = decode_sequence_example(data)
    assert decoded_context.keys() == context.keys()
    assert decoded_lists.keys() == lists.keys()
    for name, wanted in context.items():
        check(decoded_context[name], wanted)
    for name, steps in lists.items():
        for ours, wanted in zip(decoded_lists[name], steps, strict=True):
            check(ours, wanted)


@pytest.mark.parametrize("case", SEQUENCES, ids=note)
def test_parsed_sequence_examples(case):
    data = base64.b64decode(case["serialized"])
    kinds = {
        name: {step["kind"] or "float" for step in steps}
        for name, steps in case["feature_lists"].items()
    }
    spec = {name: Ragged(DTYPES[found.pop()]) for name, found in kinds.items() if len(found) == 1}
    _, lists = parse_sequence_examples([data, data], {}, spec)
    for name in spec:
        for steps in lists[name]:
            for ours, wanted in zip(steps, case["feature_lists"][name], strict=True):
                check(ours, array(wanted if wanted["kind"] else {"kind": "float", "values": []}))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["proto"] == "value conversion"], ids=note
)
def test_conversions(case):
    value = VALUES.get(case["note"])
    if value is None:
        pytest.skip("the kind follows from the value here, so that this cannot be asked for")
    if "error" in case:
        error = {"TypeError": TypeError, "ValueError": ValueError}[case["error"]]
        with pytest.raises(error, match=r"feature v"):
            encode_example({"v": value})
    else:
        values = decode_example(encode_example({"v": value}))["v"]
        np.testing.assert_array_equal(values, np.array(case["value"], float).astype(np.float32))


LISTS = {
    "Int64List": messages.Int64List,
    "FloatList": messages.FloatList,
    "BytesList": messages.BytesList,
}
GIVEN = {
    "a float": 1.5,
    "2**63": 2**63,
    "a bool": True,
    "an int": 3,
    "1e40": 1e40,
    "str": "a",
    "int": 3,
}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["proto"] == "value conversion"], ids=note
)
def test_the_messages_themselves_take_and_refuse_the_same(case):
    kind, _, given = case["note"].partition(" of ")
    if "error" not in case:
        assert list(LISTS[kind](value=[GIVEN[given]]).value) == [
            float(value) for value in case["value"]
        ]
        return
    with pytest.raises({"TypeError": TypeError, "ValueError": ValueError}[case["error"]]):
        LISTS[kind](value=[GIVEN[given]])
