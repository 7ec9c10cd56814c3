"""Real checkpoints of TensorFlow, whole and damaged."""

import base64
import os
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from bundles import (
    assert_same,
    attempt,
    block,
    sealed,
    table,
)
from hypothesis import given
from hypothesis import strategies as st
from references import FOLDER, cases

from ftrain.formats.tf_bundle import read_table
from ftrain.formats.tf_checkpoint import (
    TfCheckpoint,
    TfCheckpointError,
    TfVariable,
    format_state,
    is_tf_checkpoint,
    latest_tf_checkpoint,
    parse_state,
)

ROOT = FOLDER / "tf_checkpoint"
CASES = cases("tf_checkpoint/variables")
SAVES = [
    event
    for case in cases("saver")
    for event in case.get("events", ())
    if "checkpoint_file" in event
]
each_case = pytest.mark.parametrize("case", CASES, ids=[case["directory"] for case in CASES])


# Real checkpoints


def folder_of(case):
    return ROOT / case["directory"]


def prefix_of(case):
    return folder_of(case) / case["prefix"]


def recorded(tensor):
    """The value of a tensor in the reference."""
    shape, dtype, value = tensor["shape"], tensor["dtype"], tensor["value"]
    if dtype == "string":
        flat = np.array(value, object).reshape(-1)
        return np.array([*map(base64.b64decode, flat), None], object)[:-1].reshape(shape)
    if dtype.startswith("complex"):
        return np.array(value, float).reshape(*shape, 2).view(complex).astype(dtype).reshape(shape)
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    exact = dtype == "bool" or "int" in dtype  # 64 bits do not fit in a float
    return np.array(value, target if exact else float).astype(target).reshape(shape)


def contents(prefix):
    """Return all contents of a checkpoint, in a form in which NaN equals NaN."""
    checkpoint = TfCheckpoint(prefix)
    values = [checkpoint.read(name) for name in checkpoint.variables]
    exact = [value.tolist() if value.dtype == object else value.tobytes() for value in values]
    return (
        dict(checkpoint.variables),
        [value.shape for value in values],
        exact,
        checkpoint.objects(),
    )


@pytest.mark.reference
@each_case
def test_the_variables_are_those_that_tensorflow_lists(case):
    wanted = {
        tensor["name"]: TfVariable(tuple(tensor["shape"]), tensor["dtype"])
        for tensor in case["tensors"]
    }
    variables = TfCheckpoint(prefix_of(case)).variables
    assert dict(variables) == wanted
    assert list(variables) == sorted(wanted)


@pytest.mark.reference
@each_case
@pytest.mark.parametrize("verify", [True, False])
def test_every_value_is_the_one_that_tensorflow_saved(case, verify):
    checkpoint = TfCheckpoint(str(prefix_of(case)))
    for tensor in case["tensors"]:
        assert_same(checkpoint.read(tensor["name"], verify=verify), recorded(tensor))


@pytest.mark.reference
@each_case
def test_the_paths_of_objects_lead_to_all_variables_of_an_object_based_checkpoint(case):
    checkpoint = TfCheckpoint(prefix_of(case))
    objects = checkpoint.objects()
    graph = "_CHECKPOINTABLE_OBJECT_GRAPH"
    if graph not in checkpoint.variables:
        assert objects == {}
        return
    assert {*objects.values()} == {*checkpoint.variables} - {graph}
    # TensorFlow makes keys of paths: "." in a name becomes "..", "/" becomes ".S", and words of its
    # own start with ".".
    plain = {"..": ".", ".S": "/", ".OPTIMIZER_SLOT/": ""}
    for path, key in objects.items():
        words = key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").replace("/.ATTRIBUTES/", "/")
        assert path == re.sub(r"\.\.|\.S|\.OPTIMIZER_SLOT/", lambda found: plain[found[0]], words)


@pytest.mark.reference
@each_case
def test_the_state_file_is_read_and_written_as_tensorflow_does(case):
    text = case["checkpoint_state_text"]
    state = parse_state(text)
    assert state.latest == case["prefix"]
    assert format_state(case["prefix"], state.all) == text
    assert latest_tf_checkpoint(folder_of(case)) == prefix_of(case)
    assert is_tf_checkpoint(prefix_of(case))
    assert not is_tf_checkpoint(folder_of(case))


@pytest.mark.reference
@pytest.mark.parametrize("event", SAVES, ids=range(len(SAVES)))
def test_the_state_file_after_each_save_is_the_text_that_tensorflow_wrote(event):
    latest, *kept = (
        os.path.basename(path) for path in [event["latest_checkpoint"], *event["last_checkpoints"]]
    )
    assert format_state(latest, kept) == event["checkpoint_file"]
    assert parse_state(event["checkpoint_file"]) == (
        latest,
        tuple(kept) if latest in kept else (*kept, latest),
    )


# Damage to real checkpoints


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """For each case a copy to damage, its prefix, the bytes of its index and its contents."""
    root = tmp_path_factory.mktemp("checkpoints")
    for case in CASES:
        shutil.copytree(folder_of(case), root / case["directory"])
    prefixes = [root / case["directory"] / case["prefix"] for case in CASES]
    return [
        (prefix, prefix.with_name(f"{prefix.name}.index").read_bytes(), contents(prefix))
        for prefix in prefixes
    ]


@pytest.mark.reference
@each_case
def test_a_flipped_byte_in_a_data_file_is_reported_by_the_variable_it_is_in(case, tmp_path):
    prefix = shutil.copytree(folder_of(case), tmp_path / "copy") / case["prefix"]
    intact = contents(prefix)
    for path in tmp_path.glob(f"copy/{case['prefix']}.data-*"):
        data = path.read_bytes()
        found = 0
        for place in range(0, len(data), max(1, len(data) // 100)):
            path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
            outcome = attempt(lambda: contents(prefix))
            assert outcome == intact or "damaged" in str(outcome)
            found += outcome != intact  # must differ, except in bytes of no variable
        path.write_bytes(data)
        assert found or not data


@pytest.mark.reference
@each_case
def test_every_byte_of_an_index_is_covered_but_for_its_end(case, tmp_path):
    prefix = shutil.copytree(folder_of(case), tmp_path / "copy") / case["prefix"]
    path = prefix.with_name(f"{prefix.name}.index")
    index = path.read_bytes()
    intact = TfCheckpoint(prefix).variables
    # The footer has no checksum, and the empty block before the last one is not read.
    start = index.rindex(empty := sealed(block([])))
    unread = {*range(start, start + len(empty)), *range(len(index) - 48, len(index))}
    for place in range(0, len(index), max(1, len(index) // 500)):
        path.write_bytes(index[:place] + bytes([index[place] ^ 1]) + index[place + 1 :])
        outcome = attempt(lambda: TfCheckpoint(prefix).variables)
        assert isinstance(outcome, TfCheckpointError) or (place in unread and outcome == intact)


@pytest.mark.reference
@given(st.data())
def test_a_damaged_index_is_reported_or_read_as_before(copies, data):
    prefix, index, intact = data.draw(st.sampled_from(copies), label="checkpoint")
    damaged = bytearray(index)
    places = st.integers(0, len(index) - 1)
    for place in data.draw(st.lists(places, max_size=3), label="flipped"):
        damaged[place] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans(), label="cut") or damaged == index:
        damaged = damaged[: data.draw(places)]
    prefix.with_name(f"{prefix.name}.index").write_bytes(damaged)
    outcome = attempt(lambda: contents(prefix))
    assert outcome == intact or str(prefix) in str(outcome)


@pytest.mark.reference
@given(st.data())
def test_damage_under_right_checksums_raises_nothing_else(copies, data):
    prefix, index, _ = data.draw(st.sampled_from(copies), label="checkpoint")
    entries = [list(entry) for entry in read_table(index)]
    for _ in range(data.draw(st.integers(1, 3))):
        entry, side = data.draw(st.sampled_from(entries)), data.draw(st.sampled_from([0, 1, 1, 1]))
        at, end = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(entry[side]))])))
        entry[side] = entry[side][:at] + data.draw(st.binary(max_size=12)) + entry[side][end:]
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(sorted(entries)))
    checkpoint = attempt(lambda: TfCheckpoint(prefix))
    if isinstance(checkpoint, TfCheckpoint):
        values = [attempt(lambda name=name: checkpoint.read(name)) for name in checkpoint.variables]
        assert all(isinstance(value, np.ndarray) or str(prefix) in str(value) for value in values)
        attempt(checkpoint.objects)
