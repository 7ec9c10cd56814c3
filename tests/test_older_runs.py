"""A run directory of an earlier version is verified, evaluated and resumed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from command import run

from ftrain.checkpoints import list_variables, load_variable, verify

OLDER = Path(__file__).parent / "fixtures" / "run_before_renames"


@pytest.fixture
def older(tmp_path) -> Path:
    return shutil.copytree(OLDER, tmp_path / "run")


def test_its_checkpoint_is_good(older):
    assert verify(older / "checkpoints" / "6") == []
    listed = run("ckpt", "list", older)
    assert listed.returncode == 0, listed.stderr
    assert "6" in listed.stdout


def test_it_is_evaluated(older):
    done = run("eval", older)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 6: eval/distance 1.943")


def test_it_is_resumed_as_if_it_had_not_been_interrupted(older, tmp_path):
    resumed = run("train", older, "steps=12", "--accept-changes")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step 6" in resumed.stdout
    fresh = run("train", older / "config.toml", "steps=12", f"run.directory={tmp_path / 'fresh'}")
    assert fresh.returncode == 0, fresh.stderr
    step = Path("checkpoints") / "12"
    names = [name for name, *_ in list_variables(older / step)]
    assert {"params/w", "averages/w"} <= set(names)
    for name in names:
        ours, theirs = (load_variable(home / step, name) for home in (older, tmp_path / "fresh"))
        # With a tolerance, because other machines round differently.
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=name)
