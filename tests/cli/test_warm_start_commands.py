"""[warm_start] in a config: what check shows, what train does, and what is said to mistakes."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from command import run, write_config
from safetensors.numpy import save_file

from ftrain.checkpoints import load_variable, open_reader

OLD = {"w": np.float32([3, 2, 1]), "b": np.array(0.5, np.float32)}


def ftrain(*arguments, cwd: Path, code: int = 0) -> str:
    done = run(*arguments, cwd=cwd)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def config(tmp_path) -> Path:
    save_file(OLD, tmp_path / "old.safetensors")
    path = write_config(tmp_path, steps=4, every=2)
    path.write_text(path.read_text() + '\n[warm_start]\ncheckpoint = "old.safetensors"\n')
    return path


def assert_same(one: Path, other: Path) -> None:
    left, right = open_reader(one), open_reader(other)
    assert left.variables == right.variables
    for name in left.variables:
        np.testing.assert_array_equal(left.read(name), right.read(name))


def test_a_config_starts_from_a_checkpoint_once(config):
    home = config.parent
    shown = ftrain("check", config, cwd=home)
    assert "2 leaves from" in shown
    assert "params/w" in shown
    assert "good; train it with" in shown
    said = ftrain("train", config, "run.directory=a", "checkpoint.at_start=true", cwd=home)
    assert "warm start: 2 leaves from" in said
    np.testing.assert_array_equal(load_variable(home / "a" / "0", "params/w"), OLD["w"])
    saved = tomllib.loads((home / "a" / "config.toml").read_text())
    assert saved["warm_start"]["checkpoint"] == "old.safetensors"
    record = json.loads((home / "a" / "warm_start.json").read_text())
    assert record["taken"] == {"params/b": "b", "params/w": "w"}
    ftrain("train", config, "run.directory=b", "steps=2", "checkpoint.at_start=true", cwd=home)
    (home / "old.safetensors").unlink()
    again = ftrain("train", home / "b", "steps=4", "--accept-changes", cwd=home)
    assert "warm start" not in again
    assert_same(home / "a" / "4", home / "b" / "4")
    assert "not taken again from old.safetensors" in ftrain(
        "check", home / "b", "steps=4", cwd=home
    )
    assert "distance" in ftrain("eval", home / "b", cwd=home)


def test_a_run_is_a_checkpoint_and_best_is_one_of_it(config):
    home = config.parent
    best = ["checkpoint.keep_best=1", "checkpoint.best_metric=eval/distance"]
    best += ["checkpoint.best_mode=min", "checkpoint.restore_best=true"]
    said = ftrain("train", config, "run.directory=a", "steps=6", *best, cwd=home)
    assert "done" in said
    step = json.loads((home / "a" / "checkpoints" / "checkpoints.json").read_text())
    chosen = min(step["checkpoints"], key=lambda each: each["metrics"]["eval/distance"])["step"]
    for which in ("best", "latest", "2"):
        assert ftrain("eval", home / "a", "--step", which, cwd=home).startswith(
            f"step {({'best': chosen, 'latest': 6}).get(which, 2)}: "
        )
    assert ftrain("eval", home / "a", cwd=home).startswith(f"step {chosen}: ")
    wrong = ftrain("eval", home / "a", "--step", "worst", cwd=home, code=2)
    assert "a step must be a whole number, best or latest, got 'worst'" in wrong
    shown = ftrain("check", config, "warm_start.checkpoint=a/best", cwd=home)
    assert f"2 leaves from {home}/a/checkpoints/{chosen}" in shown.replace("\n", "")
    everything = ["warm_start.checkpoint=a", 'warm_start.include=[".*"]', "steps=8"]
    ftrain("train", config, "run.directory=c", *everything, cwd=home)
    ftrain("train", home / "a", "steps=8", "--accept-changes", cwd=home)
    assert_same(home / "c" / "8", home / "a" / "8")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["warm_start.checkpoint=nowhere"], "nowhere does not exist; expected a checkpoint"),
        (["warm_start.checkpoint=cut.safetensors"], "array 'w' ends at data byte 16"),
        (['warm_start.include=["params/x"]'], "include pattern 'params/x' matches no leaf of the"),
        (['warm_start.rename={"x/" = "y/"}'], "rename pattern 'x/' matches no leaf of"),
        (["warm_start.checkpoint=other.npz"], "leaf params/w (there w) is float32[4], expected f"),
        (["warm_start.chekpoint=a"], "did you mean checkpoint"),
        (["warm_start.cast=3"], "warm_start.cast: must be a valid boolean"),
        (['warm_start.include=["("]'], "[warm_start] '(' is not a regular expression"),
        (["checkpoint.restore_best=true"], "[checkpoint] restore_best needs keep_best"),
        (
            [
                'warm_start.vocabularies={"params/v"={new_vocab="n", new_vocab_size=3, '
                'num_oov_buckets=0, old_vocab="o"}}'
            ],
            "vocabularies: params/v is not a leaf to take, nearest are",
        ),
    ],
)
def test_mistakes_are_two_lines_and_leave_nothing(config, overrides, said):
    home = config.parent
    (home / "cut.safetensors").write_bytes((home / "old.safetensors").read_bytes()[:-2])
    np.savez(home / "other.npz", w=np.zeros(4, np.float32), b=np.float32(0))
    for command in ("check", "train"):
        text = ftrain(command, config, "run.directory=run", *overrides, cwd=home, code=2)
        assert said in text
        assert len(text.strip().splitlines()) <= 2
    assert not (home / "run").exists()


def test_rows_move_to_a_new_vocabulary_from_a_config(config):
    home = config.parent
    (home / "old.txt").write_text("a\nb\nc\n")
    (home / "new.txt").write_text("c\na\nd\n")
    table = '\n[warm_start.vocabularies."params/w"]\nnew_vocab = "new.txt"\nnew_vocab_size = 3\n'
    table += 'num_oov_buckets = 0\nold_vocab = "old.txt"\n'
    config.write_text(config.read_text() + table)
    ftrain("train", config, "run.directory=a", "checkpoint.at_start=true", cwd=home)
    np.testing.assert_array_equal(load_variable(home / "a" / "0", "params/w"), [1, 3, 0])


@pytest.mark.campaign
def test_several_processes_start_from_one_checkpoint_and_end_with_the_best(config):
    home = config.parent
    best = ["checkpoint.keep_best=1", "checkpoint.best_metric=eval/distance"]
    best += ["checkpoint.best_mode=min", "checkpoint.restore_best=true", "steps=8"]
    said = ftrain("launch", "-n", "2", config, "run.directory=a", *best, cwd=home)
    assert "warm start: 2 leaves from" in said
    ftrain("train", config, "run.directory=b", *best, cwd=home)
    assert "the run ends with its best state" in said or "step 8" in said
    for step in ("best", "latest"):
        for name in open_reader(home / "a" / step).variables:
            left, right = (load_variable(home / each / step, name) for each in "ab")
            np.testing.assert_allclose(left, right, rtol=1e-5)
