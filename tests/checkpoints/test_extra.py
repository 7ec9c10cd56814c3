"""Extra values in the manifest, and metrics added after a checkpoint was saved."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.checkpoints import CheckpointError, CheckpointManager, DamagedError, SaveError, verify
from ftrain.checkpoints.manifest import Manifest, decode_extra, encode_extra, read_manifest

TREE = {"w": jnp.arange(4.0)}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text().filter(lambda key: key != "$float"), inner)
    ),
)


def forbid(constant):
    raise AssertionError(f"{constant} is not JSON")


@settings(max_examples=25)
@given(values=st.dictionaries(st.text().filter(lambda key: key != "$float"), VALUES))
def test_what_is_stored_comes_back_through_strict_json(values):
    text = json.dumps(encode_extra(values), allow_nan=False)
    assert decode_extra(json.loads(text, parse_constant=forbid)) == values


def test_extra_values_are_stored_with_their_checkpoint(tmp_path):
    extra = {
        "Stop": {
            "best": -math.inf,
            "worst": math.nan,
            "looks": np.int64(3),
            "value": jnp.float32(0.5),
        }
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TREE, extra=extra)
        manager.save(2, TREE)
    found = CheckpointManager(tmp_path).extra(1)["Stop"]
    assert math.isnan(found.pop("worst"))
    assert found == {"best": -math.inf, "looks": 3, "value": 0.5}
    assert CheckpointManager(tmp_path).extra(2) == {}
    json.loads((tmp_path / "1" / "manifest.json").read_text(), parse_constant=forbid)
    assert verify(tmp_path / "1") == []


def test_they_are_copied_when_the_save_starts(tmp_path):
    extra = {"counts": [1, 2]}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TREE, extra=extra)
        extra["counts"].append(3)
    assert CheckpointManager(tmp_path).extra(1) == {"counts": [1, 2]}


def test_a_change_to_them_is_damage(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, TREE, extra={"looks": 3})
    path = tmp_path / "1" / "manifest.json"
    path.write_text(path.read_text().replace('"looks": 3', '"looks": 4'))
    with pytest.raises(DamagedError, match="checksum is wrong"):
        manager.restore(TREE, step=1)


def test_a_manifest_without_them_is_what_it_was_before_there_were_any(tmp_path):
    """Checkpoints of older versions verify, and resume."""
    CheckpointManager(tmp_path).save(1, TREE, metrics={"loss": 0.5})
    path = tmp_path / "1" / "manifest.json"
    text = path.read_text()
    assert set(json.loads(text)["manifest"]) == {
        "step",
        "time",
        "metrics",
        "not_finite",
        "leaves",
        "files",
    }
    assert Manifest.model_validate(json.loads(text)["manifest"]).as_text() == text
    manager = CheckpointManager(tmp_path)
    np.testing.assert_array_equal(manager.restore(TREE)["w"], TREE["w"])
    assert manager.restored == 1
    assert manager.extra(1) == {}


def test_a_manifest_with_a_number_that_is_not_json_is_damaged(tmp_path):
    CheckpointManager(tmp_path).save(1, TREE, metrics={"loss": 0.5})
    path = tmp_path / "1" / "manifest.json"
    path.write_text(path.read_text().replace("0.5", "NaN"))
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        read_manifest(tmp_path / "1")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"hook": {"state": jnp.ones(3)}},
            "extra/hook/state is a ArrayImpl, which cannot be stored",
        ),
        ({"hook": [object()]}, "extra/hook/0 is a object, which cannot be stored"),
        ({"hook": {3: 4}}, "extra/hook has the key 3; expected a string"),
        ({"$float": "inf"}, "expected a string other than"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path, extra, message):
    with pytest.raises(CheckpointError, match=message):
        CheckpointManager(tmp_path).save(1, TREE, extra=extra)
    assert CheckpointManager(tmp_path).steps() == []


def test_the_step_that_was_restored_is_not_the_damaged_one(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TREE, extra={"looks": 1})
        manager.save(2, TREE, extra={"looks": 2})
    (tmp_path / "2" / "manifest.json").write_text("{}")
    manager = CheckpointManager(tmp_path, on_warning=lambda text: None)
    manager.restore(TREE)
    assert manager.extra(manager.restored) == {"looks": 1}


def test_metrics_of_a_saved_checkpoint_are_completed(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TREE, metrics={"loss": 0.5}, extra={"a": 1, "b": 2})
        manager.complete(1, metrics={"score": 0.9, "none": math.nan}, extra={"b": 3})
    assert CheckpointManager(tmp_path).checkpoints()[0].metrics == {"loss": 0.5, "score": 0.9}
    assert CheckpointManager(tmp_path).extra(1) == {"a": 1, "b": 3}
    assert verify(tmp_path / "1") == []
    (tmp_path / "checkpoints.json").unlink()  # the manifest has them too
    assert CheckpointManager(tmp_path).checkpoints()[0].metrics == {"loss": 0.5, "score": 0.9}


def test_nothing_is_written_if_all_is_known(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, TREE, metrics={"loss": 0.5}, extra={"a": math.inf})
    files = [tmp_path / "checkpoints.json", tmp_path / "1" / "manifest.json"]
    before = [file.stat().st_mtime_ns for file in files]
    manager.complete(1, metrics={"loss": 0.5}, extra={"a": math.inf})
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.parametrize(("score", "kept"), [(0.9, [2]), (0.1, [1, 2])])
def test_the_best_is_chosen_anew(tmp_path, score, kept):
    with CheckpointManager(
        tmp_path, keep=1, keep_best=1, best_metric="score", best_mode="max"
    ) as manager:
        manager.save(1, TREE, metrics={"score": 0.5})
        manager.save(2, TREE)
        manager.wait()
        assert manager.steps() == [1, 2]
        manager.complete(2, metrics={"score": score})
        assert manager.steps() == kept
        assert manager.best() == kept[0]


def test_completing_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 7"):
        CheckpointManager(tmp_path).complete(7, metrics={"score": 1.0})


def test_a_disk_that_cannot_be_written_is_a_failed_save(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    manager.save(1, TREE)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ftrain.storage.sync", fail)
    with pytest.raises(SaveError, match=r"the metrics of .*1 were not written: .*No space left"):
        manager.complete(1, metrics={"score": 1.0})
    assert verify(tmp_path / "1") == []
