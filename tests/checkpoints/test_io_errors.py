"""A disk that fails for a while: nothing is lost, and nothing counts as damaged."""

import errno
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ftrain.checkpoints import CheckpointManager, SaveError, open_reader, verify
from ftrain.storage import TIMEOUT, is_transient

TREE = {"w": jnp.arange(12.0)}


class Failing:
    """Replaces a function; fails `count` times with a system error for files of one name."""

    def __init__(self, real, name, count, code=errno.ESTALE):
        self.real, self.name, self.left, self.code = real, name, count, code

    def __call__(self, path, *arguments, **options):
        if self.left and not isinstance(path, int) and Path(path).name == self.name:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code), str(path))
        return self.real(path, *arguments, **options)


@pytest.fixture
def directory(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, TREE)
    manager.save(2, {"w": TREE["w"] + 1})
    return tmp_path


def fail_to_read(monkeypatch, name, count, **options):
    monkeypatch.setattr("builtins.open", Failing(open, name, count, **options))


NAMES = ["manifest.json", "_METADATA", "checkpoints.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_restore_waits_for_a_file_that_cannot_be_read(directory, monkeypatch, name):
    fail_to_read(monkeypatch, name, 2)
    tree = CheckpointManager(directory).restore(like=TREE)
    np.testing.assert_array_equal(tree["w"], TREE["w"] + 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EMFILE])
def test_a_file_that_cannot_be_read_is_not_damaged(directory, monkeypatch, name, code):
    monkeypatch.setenv(TIMEOUT, "0")
    with monkeypatch.context() as patched:
        fail_to_read(patched, name, 10**6, code=code)
        manager = CheckpointManager(directory)
        with pytest.raises(OSError, match=os.strerror(code)):
            manager.restore(like=TREE)
        if name != "checkpoints.json":
            for look in (open_reader, verify):
                with pytest.raises(OSError, match=os.strerror(code)):
                    look(directory / "2")
    np.testing.assert_array_equal(
        manager.restore(like=TREE)["w"], TREE["w"] + 1
    )  # nothing was set aside


def test_a_part_of_a_checkpoint_that_cannot_be_listed_is_not_missing(directory, monkeypatch):
    monkeypatch.setenv(TIMEOUT, "0")
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", Failing(os.scandir, "d", 10**6))
        with pytest.raises(OSError, match="Stale"):
            CheckpointManager(directory).restore(like=TREE)
    assert verify(directory / "2") == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_save_that_fails_for_a_while_is_done_again(directory, monkeypatch, code):
    import ftrain.checkpoints.writer as writer

    monkeypatch.setattr(writer, "sync", Failing(writer.sync, "manifest.ocdbt", 2, code))
    manager = CheckpointManager(directory)
    manager.save(3, {"w": TREE["w"] + 2})
    assert verify(directory / "3") == []
    assert manager.steps() == [1, 2, 3]
    assert not [path.name for path in directory.iterdir() if "saving" in path.name]


def test_a_save_that_keeps_failing_is_an_error_that_may_pass(directory, monkeypatch):
    import ftrain.checkpoints.writer as writer

    monkeypatch.setenv(TIMEOUT, "0")
    monkeypatch.setattr(writer, "sync", Failing(writer.sync, "manifest.ocdbt", 10**6))
    with pytest.raises(
        SaveError, match=r"was not saved: .*Stale.*; remaining checkpoints: 1, 2"
    ) as caught:
        CheckpointManager(directory).save(3, TREE)
    assert is_transient(caught.value)
