"""Run directories in the place of a config, and commands that can be pasted into a shell."""

import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from command import ROOT, run, write_config

from ftrain.cli.check import check
from ftrain.config import ConfigError, load, plan
from ftrain.summaries import read_metrics

NESTED = """
optimizer={name="optax.apply_if_finite", max_consecutive_errors=3, inner={name="optax.chain",
args=[{name="guard", optimizer={name="adam", learning_rate={name="cosine_decay",
learning_rate=0.1, decay_steps=60}}}]}}
""".replace("\n", " ")


def trained(*arguments: str | Path) -> str:
    done = run("train", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps_written(home: Path) -> list[int]:
    return [line["step"] for line in read_metrics(home / "metrics.jsonl")]


def test_a_run_directory_is_resumed_where_it_is_now(tmp_path):
    config = write_config(tmp_path, steps=40, every=20)
    home = tmp_path / "my runs" / "first"
    trained(config, f"run.directory={home}", "summary.every_steps=20")
    assert "all 40 steps were taken before" in trained(home)

    moved = tmp_path / "moved"
    shutil.copytree(home, moved)
    refused = run("train", moved, "steps=60")
    assert refused.returncode == 2
    assert "steps was 40, now 60" in refused.stderr
    shown = trained(moved, "steps=60", "--accept-changes").splitlines()
    assert (
        shown[0] == f"{moved}: the run was moved and resumes here; "
        f"its config has run.directory = '{home}'"
    )
    assert "resumed at step 40" in "\n".join(shown)
    assert steps_written(moved) == [20, 40, 60]
    assert steps_written(home) == [20, 40]
    assert tomllib.loads((moved / "config.toml").read_text())["run"]["directory"] == str(moved)
    assert "all 60 steps were taken before" in trained(moved)


@pytest.mark.campaign
def test_a_run_with_nested_tables_is_resumed_from_its_resolved_config(tmp_path):
    config = write_config(tmp_path, steps=40, every=20)
    home = tmp_path / "run"
    model = ["task=typed_task:typed", "model={head={width=3, activation='gelu'}, level=2}"]
    config.write_text(config.read_text().replace("noise = 0.1", ""))
    trained(config, f"run.directory={home}", NESTED.strip(), *model)
    assert "all 40 steps were taken before" in trained(home)
    assert "all 40 steps were taken before" in trained(home / "config.toml")
    mistake = run(
        "train", home, "optimizer.inner.args.0.optimizer.learning_rte=3", "--accept-changes"
    )
    assert mistake.returncode == 2
    assert (
        "optimizer.inner.args.0.optimizer.learning_rte: unknown key; did you mean learning_rate?"
        in mistake.stderr
    )
    assert len(mistake.stderr.splitlines()) <= 2


def test_a_directory_without_a_config_is_two_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("run/checkpoints/20").mkdir(parents=True)
    Path("run/config.toml").write_text("")
    for command in (["train"], ["check"], ["launch", "-n", "2"], ["schedule"], ["verify-resume"]):
        done = run(*command, "empty")
        assert done.returncode == 2, command
        assert done.stderr.splitlines()[0] == "ftrain: empty: is a directory without a config.toml"
        assert len(done.stderr.splitlines()) == 2
    with pytest.raises(
        ConfigError,
        match=r"run/checkpoints/20: is a directory without a config.toml; did you mean run\?",
    ):
        load("run/checkpoints/20")


def test_an_override_of_the_directory_makes_another_run_of_the_same_config(tmp_path):
    (tmp_path / "config.toml").write_text((ROOT / "configs" / "digits.toml").read_text())
    here = load(tmp_path)
    assert plan(here).resolved()["run"]["directory"] == str(tmp_path)
    assert "run.directory = 'runs/digits'" in (here.notice or "")
    elsewhere = load(tmp_path, ["run.directory=elsewhere"])
    assert plan(elsewhere).resolved()["run"]["directory"] == "elsewhere"
    assert elsewhere.notice is None


def test_what_check_prints_can_be_pasted_into_a_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "my configs"
    directory.mkdir()
    config = write_config(directory, steps=60, every=20)
    overrides = [
        'optimizer={name="adam", learning_rate=0.1}',
        "run.directory=runs/it's mine",
        "mesh.data=1",
    ]
    check(config, overrides)
    printed = capsys.readouterr().out.partition("train it with: ")[2]
    assert shlex.split(printed) == ["ftrain", "train", str(config), *overrides]


def test_what_train_prints_can_be_pasted_into_a_shell(tmp_path):
    config = write_config(tmp_path, steps=2, every=2)
    home = tmp_path / "it's mine"
    shown = trained(config, f"run.directory={home}")
    for name, word in (("look at it:", "--logdir"), ("evaluate it:", "eval")):
        words = shlex.split(shown.partition(name)[2].splitlines()[0])
        assert words[words.index(word) + 1] == str(home)
    exploding = [
        "task=regression:exploding",
        "model={at=3}",
        "optimizer={name='gradient_descent', learning_rate=1.0}",
    ]
    spoiled = run("train", config, *exploding, f"run.directory={tmp_path}/a b", "steps=9")
    assert spoiled.returncode == 1
    assert f"ftrain replay '{tmp_path}/a b'" in spoiled.stderr


def test_a_run_from_before_a_key_was_added_is_resumed(tmp_path):
    """Its config.toml lacks the key, which now has its default; any other value is a change."""
    config = write_config(tmp_path, steps=10, every=5)
    home = tmp_path / "run"
    assert run("train", config, f"run.directory={home}").returncode == 0
    resolved = (home / "config.toml").read_text()
    for line in ("merge_rows = true", "averages_ramp = false"):
        assert line in resolved
        resolved = resolved.replace(line, "")
    (home / "config.toml").write_text(resolved)
    resumed = run("train", config, f"run.directory={home}")
    assert resumed.returncode == 0, resumed.stderr
    assert "all 10 steps were taken before" in resumed.stdout
    (home / "config.toml").write_text(resolved)
    changed = run("train", config, f"run.directory={home}", "step.merge_rows=false")
    assert changed.returncode == 2
    assert "step.merge_rows was True, now False" in changed.stderr
