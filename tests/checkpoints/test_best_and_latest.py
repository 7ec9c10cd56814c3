"""The names best and latest, wherever a step or a checkpoint is named."""

import numpy as np
import pytest

from ftrain.checkpoints import (
    CheckpointError,
    CheckpointManager,
    list_variables,
    load_variable,
    open_reader,
)


@pytest.fixture
def home(tmp_path):
    manager = CheckpointManager(
        tmp_path / "run" / "checkpoints", keep_best=1, best_metric="accuracy", best_mode="max"
    )
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.7)):
        manager.save(step, {"w": np.float32([step])}, metrics={"accuracy": accuracy})
    return tmp_path / "run"


def test_paths_name_checkpoints_by_role(home):
    for inner in (home, home / "checkpoints"):
        assert load_variable(inner / "best", "w") == 20
        assert load_variable(inner / "latest", "w") == 30
    assert open_reader(f"{home}/best").path == home / "checkpoints" / "20"
    assert list_variables(home / "20") == [("w", (1,))]


def test_a_manager_takes_names_for_steps(home):
    manager = CheckpointManager(home)  # what is best is known from the directory
    like = {"w": np.zeros(1, np.float32)}
    assert manager.restore(like=like, step="best")["w"] == 20
    assert manager.restored == 20
    assert manager.restore(like=like, step="latest")["w"] == 30
    assert manager.check(like, "best").name == "20"
    manager.pin("best")
    with pytest.raises(CheckpointError, match="20 is pinned"):
        manager.delete("best")
    manager.delete("latest")
    assert manager.steps() == [10, 20]
    with pytest.raises(CheckpointError, match="'best' or 'latest', got 'worst'"):
        manager.restore(like=like, step="worst")


def test_without_a_best_the_way_out_is_named(tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint yet"):
        open_reader(tmp_path / "best")
    manager.save(3, {"w": np.float32([1])}, metrics={"loss": 1.0})
    with pytest.raises(CheckpointError, match=r"set keep_best, best_metric .*, or name a step: 3"):
        open_reader(tmp_path / "best")
    CheckpointManager(tmp_path, keep_best=1, best_metric="f1", best_mode="max").save(
        4, {"w": np.float32([1])}
    )
    with pytest.raises(CheckpointError, match=r"none of its checkpoints has a finite 'f1'.*3, 4"):
        open_reader(tmp_path / "best")


def test_a_directory_of_that_name_is_itself(home):
    CheckpointManager(home / "best").save(7, {"w": np.float32([7])})
    assert load_variable(home / "best", "w") == 7
