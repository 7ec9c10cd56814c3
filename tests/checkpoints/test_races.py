"""Several processes in one directory, and files that other programs leave there."""

import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftrain.checkpoints import (
    CheckpointError,
    CheckpointManager,
    DamagedError,
    LeafMismatchError,
    SaveError,
    verify,
)
from ftrain.checkpoints import restore as restore_room


def tree(value: float = 1.0):
    return {"x": jnp.full(3, value)}


def test_two_managers_write_one_after_the_other(tmp_path):
    with CheckpointManager(tmp_path) as one, CheckpointManager(tmp_path) as other:
        one.save(1, {"w": np.ones(20_000_000, np.float32)})
        other.save(2, tree())  # which would remove the half-written save of the first as a leftover
        one.wait()
        other.wait()
    assert verify(tmp_path / "1") == verify(tmp_path / "2") == []


def test_what_was_taken_away_while_it_was_written_is_not_called_saved(tmp_path, monkeypatch):
    from ftrain.checkpoints import writer

    describe = writer._describe

    def slowly(held):
        time.sleep(0.5)
        for path in tmp_path.glob("2.saving*/state/ocdbt.process_0/d/*"):
            path.unlink()
        return describe(held)

    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, tree())
    monkeypatch.setattr(writer, "_describe", slowly)
    with pytest.raises(SaveError, match="2 was not saved"):
        manager.save(2, {f"{n}": np.random.default_rng(n).random(5000) for n in range(5)})
    assert manager.steps() == [1]
    assert verify(tmp_path / "1") == []


WRITER = """
import sys, numpy as np
from ftrain.checkpoints import CheckpointManager
with CheckpointManager(sys.argv[1], keep=1) as manager:
    for step in range(1, 120):
        manager.save(step, {"x": np.full(1000, float(step))})
        manager.wait()
"""


@pytest.mark.campaign
def test_a_reader_beside_a_writer_that_deletes_always_finds_one(tmp_path):
    CheckpointManager(tmp_path).save(0, {"x": np.zeros(1000)})
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path])
    read = set()
    try:
        while writer.poll() is None:
            value = CheckpointManager(tmp_path, on_warning=pytest.fail).restore(
                like={"x": np.zeros(1000)}
            )["x"]
            assert (value == value[0]).all()
            read.add(value[0])
    finally:
        writer.kill()
        writer.wait()
    assert writer.returncode == 0
    assert len(read) > 5


def test_a_step_that_is_being_replaced_is_still_there(tmp_path):
    """During a replacement the old checkpoint has another name, and the new one has none yet.

    This state remains if the process is killed then.
    """
    CheckpointManager(tmp_path).save(5, tree(5.0))
    (tmp_path / "5").rename(tmp_path / "5.replaced")
    manager = CheckpointManager(tmp_path)
    assert manager.steps() == [5]
    assert float(manager.restore(like=tree())["x"][0]) == 5.0
    with pytest.raises(
        CheckpointError, match="5 exists already; pass overwrite=True to replace it"
    ):
        manager.save(5, tree(6.0))


@pytest.mark.parametrize(
    "odd", ["file", "dangling link", "loop", "empty directory", "leading zeros"]
)
def test_what_only_looks_like_a_checkpoint_is_passed_over(tmp_path, odd):
    CheckpointManager(tmp_path).save(1, tree(1.0))
    if odd == "file":
        (tmp_path / "7").write_text("x")
    elif odd == "empty directory":
        (tmp_path / "0").mkdir()
        os.utime(tmp_path / "0", (1, 1))  # older than the good one
    elif odd == "leading zeros":
        (tmp_path / "007").mkdir()
    else:
        (tmp_path / "7").symlink_to(tmp_path / ("7" if odd == "loop" else "nowhere"))
    manager = CheckpointManager(tmp_path)
    assert manager.latest() == 1
    assert float(manager.restore(like=tree())["x"][0]) == 1.0
    manager.save(7, tree(7.0))
    assert manager.latest() == 7


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    CheckpointManager(tmp_path).save(1, tree())
    for path in (tmp_path / "checkpoints.json", tmp_path / "1" / "manifest.json"):
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(DamagedError, match=r"file manifest\.json is missing"):
        CheckpointManager(tmp_path).restore(like=tree())


def test_a_failure_while_verifying_is_not_taken_for_success(tmp_path, monkeypatch):
    CheckpointManager(tmp_path).save(1, {"large": np.ones(500_000)})

    def fail(value, leaf):
        raise MemoryError("no room to look")

    monkeypatch.setattr(restore_room, "has_saved_values", fail)
    with pytest.raises(MemoryError):
        CheckpointManager(tmp_path).restore(like={"large": np.ones(500_000)})


def test_an_interrupt_while_waiting_loses_neither_the_save_nor_its_error(tmp_path, monkeypatch):
    from ftrain.checkpoints import writer as room

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree())
        with monkeypatch.context() as patched:
            patched.setattr(room, "wait", lambda futures: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                manager.wait()
        manager.save(2, tree())
    assert CheckpointManager(tmp_path).steps() == [1, 2]


@pytest.mark.parametrize("name", ["a/", "/", "", "a//b"])
def test_a_name_that_cannot_be_stored_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="has an empty part in its name"):
        CheckpointManager(tmp_path).save(1, {"top": {name: jnp.ones(2)}})


def test_kinds_of_keys_are_told_apart(tmp_path):
    CheckpointManager(tmp_path).save(1, {"rng": jax.random.key(1, impl="rbg")})
    manager = CheckpointManager(tmp_path)
    with pytest.raises(
        LeafMismatchError, match=r"a key of rbg\), expected uint32\[4\] \(a key of unsafe_rbg\)"
    ):
        manager.restore(like={"rng": jax.random.key(1, impl="unsafe_rbg")})


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.array([2**40]), np.int32), (np.array([1e30]), np.float16), (np.array([0.5]), np.bool_)],
)
def test_casting_never_changes_numbers_beyond_rounding(tmp_path, value, dtype):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"x": value})
    with pytest.raises(CheckpointError, match="leaf x is"):
        manager.restore(like={"x": np.zeros(1, dtype)}, cast=True)


def test_numbers_in_another_order_of_bytes_come_back(tmp_path):
    big = {"x": np.arange(3, dtype=">f4")}
    manager = CheckpointManager(tmp_path)
    manager.save(1, big)
    np.testing.assert_array_equal(manager.restore(like=big)["x"], big["x"])


def test_names_can_change_places(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": np.ones(1), "b": np.zeros(1)})
    restored = manager.restore(
        like={"a": np.ones(1), "b": np.ones(1)}, rename={"^a$": "b", "^b$": "a"}
    )
    assert (restored["a"][0], restored["b"][0]) == (0.0, 1.0)


def test_what_plain_orbax_wrote_is_verified_as_far_as_it_can_be_read(tmp_path):
    from orbax.checkpoint import v1 as ocp

    ocp.save(tmp_path / "1", {"x": jnp.arange(1000.0)})
    assert verify(tmp_path / "1") == []
    for path in (tmp_path / "1").rglob("d/*"):
        path.write_bytes(b"")
    assert verify(tmp_path / "1") == ["leaf x cannot be read: its data are damaged"]


def test_a_suspect_that_was_being_replaced_is_put_in_order(tmp_path):
    manager = CheckpointManager(tmp_path, on_warning=lambda text: None)
    manager.save(5, {"x": jnp.array(jnp.nan)})
    (tmp_path / "5.suspect").rename(tmp_path / "5.suspect.replaced")
    CheckpointManager(tmp_path).save(6, tree())
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"5.suspect", "6"}
