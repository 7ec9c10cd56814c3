"""A config that extends another one has its keys, unless it sets them itself."""

from pathlib import Path

import pytest
import tomli_w
from command import ROOT, run

from ftrain.config import ConfigError, load, plan

BASE = """
task = "regression:regression"
steps = 20

[model]
noise = 0.5
options = { a = 1, b = 2 }

[data]
batch_size = 8

[optimizer]
name = "momentum"
momentum = 0.9
learning_rate = { name = "cosine_decay", learning_rate = 0.1, decay_steps = 20 }

[[hooks]]
name = "StepCounter"
every_steps = 5

[[hooks]]
name = "StopAtStep"
num_steps = 3
"""


@pytest.fixture
def extend(tmp_path):
    """Write a config that extends the base, and return its path."""
    (tmp_path / "base.toml").write_text(BASE)

    def write(text: str, name: str = "job.toml", extends: str = "base.toml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'extends = "{extends}"\n{text}')
        return path

    return write


def resolved(path: Path, *overrides: str) -> dict:
    return plan(load(path, overrides)).resolved()


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(load(path, overrides))
    return str(caught.value)


def test_its_keys_replace_those_of_the_base(extend):
    path = extend("steps = 30\n[model]\noptions = { b = 3 }\n[log]\nevery_steps = 7")
    found = resolved(path)
    base = resolved(path.with_name("base.toml"))
    assert found["steps"] == 30
    assert found["log"]["every_steps"] == 7
    assert found["model"] == base["model"] | {"options": {"a": 1, "b": 3}}
    assert found["run"]["directory"] == "runs/job"
    for name in ("task", "seed", "data", "optimizer", "hooks"):
        assert found[name] == base[name]


def test_the_result_is_the_merged_config_without_extends(extend, tmp_path):
    found = resolved(extend("seed = 3"))
    assert "extends" not in found
    alone = tmp_path / "alone" / "job.toml"
    alone.parent.mkdir()
    alone.write_text(tomli_w.dumps(found))
    assert resolved(alone) == found


def test_a_table_of_another_function_is_replaced_as_a_whole(extend):
    adam = extend('[optimizer]\nname = "adam"\nlearning_rate = 0.25')
    assert resolved(adam)["optimizer"]["learning_rate"] == 0.25
    assert "momentum" not in resolved(adam)["optimizer"]
    nested = extend(
        '[optimizer.learning_rate]\nname = "inverse_sqrt"\nlearning_rate = 0.5\nwarmup_steps = 2'
    )
    found = resolved(nested)["optimizer"]
    assert found["momentum"] == 0.9
    assert found["learning_rate"]["name"] == "inverse_sqrt"
    assert "decay_steps" not in found["learning_rate"]


def test_a_table_of_the_same_function_is_merged(extend):
    for name in ("", 'name = "momentum"\n'):
        found = resolved(extend(f"[optimizer]\n{name}learning_rate.decay_steps = 40"))["optimizer"]
        assert found["momentum"] == 0.9
        assert found["learning_rate"]["learning_rate"] == 0.1
        assert found["learning_rate"]["decay_steps"] == 40


def test_another_task_has_a_model_of_its_own(extend):
    same = resolved(extend('task = "regression:regression"'))
    assert same["model"]["noise"] == 0.5
    other = load(extend('task = "digits"\n[model]\nhidden = 8'))
    assert other.values["model"] == {"hidden": 8}


def test_arrays_are_replaced_as_a_whole(extend):
    found = resolved(extend('[[hooks]]\nname = "StopAtStep"\nnum_steps = 4'))["hooks"]
    assert [hook["name"] for hook in found] == ["StopAtStep"]
    assert "hooks" not in resolved(extend("hooks = []"))


def test_a_value_may_become_a_table_and_a_table_a_value(extend):
    assert resolved(extend("[optimizer]\nlearning_rate = 0.5"))["optimizer"]["learning_rate"] == 0.5
    extend("[optimizer]\nlearning_rate = 0.5", "middle.toml")
    table = (
        '[optimizer.learning_rate]\nname = "inverse_sqrt"\nlearning_rate = 0.5\nwarmup_steps = 2'
    )
    path = extend(table, extends="middle.toml")
    assert resolved(path)["optimizer"]["learning_rate"]["name"] == "inverse_sqrt"


def test_chains_are_relative_to_each_file(extend, tmp_path, monkeypatch):
    extend("steps = 30\nseed = 1", "inner/middle.toml", extends="../base.toml")
    path = extend("seed = 2", extends="inner/middle.toml")
    monkeypatch.chdir(tmp_path / "inner")
    found = resolved(path)
    assert (found["steps"], found["seed"]) == (30, 2)
    assert found["model"]["noise"] == 0.5
    assert resolved(extend("", extends=str(tmp_path / "base.toml")))["steps"] == 20


def test_the_command_line_comes_last(extend):
    path = extend("steps = 30\n[model]\nnoise = 0.25")
    found = resolved(path, "steps=40", "model.noise=0.125", "optimizer.momentum=0.5")
    assert found["steps"] == 40
    assert found["model"]["noise"] == 0.125
    assert found["optimizer"]["momentum"] == 0.5
    message = "command line: extends: cannot be overridden; set it in the config"
    assert error_of(path, "extends=base.toml") == message


def test_errors_name_the_file_that_a_key_is_in(extend):
    path = extend("[data]\nbatch_size = 'x'")
    assert error_of(path).startswith(f"{path}: data.batch_size: must be a valid integer")
    path = extend("seed = 3")
    base = path.with_name("base.toml")
    base.write_text(BASE.replace("decay_steps", "decay_step"))
    key = "optimizer.learning_rate.decay_step"
    assert error_of(path).startswith(f"{base}: {key}: unknown key")
    base.write_text(BASE.replace("num_steps", "steps"))
    assert error_of(path).startswith(f"{base}: hooks.1.steps: unknown key")
    path = extend('[optimizer]\nname = "adam"\nmomentum = 0.5\nlearning_rate = 1.0')
    assert error_of(path).startswith(f"{path}: optimizer.momentum: unknown key")
    path = extend('[optimizer]\nname = "momentum"\nmomentum = -1.0')
    assert load(path).origin("optimizer.momentum") == str(path)
    assert load(path).origin("optimizer.learning_rate") == str(base)
    assert load(path, ["steps=3"]).origin("steps") == "command line"


def test_a_key_that_a_replaced_table_lacks_is_missing_in_the_file_that_replaces_it(extend):
    path = extend('[optimizer]\nname = "gradient_descent"')
    assert error_of(path).startswith(f"{path}: optimizer.learning_rate: is missing")


def test_a_cycle_is_two_lines_that_show_it(extend, tmp_path):
    extend("", "a.toml", extends="b.toml")
    extend("", "b.toml", extends="./a.toml")
    first = tmp_path / "job.toml"
    second = tmp_path / "a.toml"
    third = tmp_path / "b.toml"
    path = extend("", extends="a.toml")
    assert error_of(path) == (
        f"{third}: extends: './a.toml' makes a cycle\n{first} -> {second} -> {third} -> {second}"
    )
    extend("", extends="job.toml")
    assert error_of(path) == f"{path}: extends: 'job.toml' makes a cycle\n{path} -> {path}"
    assert error_of(tmp_path / "job.toml").count("\n") == 1


def test_a_missing_base_is_two_lines_that_name_both_files(extend, tmp_path):
    path = extend("", extends="bse.toml")
    missing = tmp_path / "bse.toml"
    assert error_of(path) == (
        f"{missing}: there is no such file; there are {tmp_path / 'base.toml'}, {path}\n"
        f"{path} extends it: extends = 'bse.toml', relative to that file"
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("extends = 3", "extends: must be the path of a config, got 3"),
        ('extends = ["a.toml"]', "extends: must be the path of a config, got ['a.toml']"),
        ('extends = "a\\nb"', "extends: must be the path of a config, got 'a\\nb'"),
        ('extends = ""', "extends: an empty string is not a path"),
        ('extends = "s3://a/b.toml"', "extends: s3://a/b.toml is a URL"),
        ('extends = "."', "cannot be read: Is a directory"),
        ('extends = "broken.toml"', "broken.toml: is not valid TOML"),
        ('[data]\nextends = "base.toml"', "data.extends: unknown key"),
    ],
)
def test_other_values_are_refused(tmp_path, written, expected):
    (tmp_path / "broken.toml").write_text("[")
    path = tmp_path / "job.toml"
    path.write_text(BASE if written.startswith("[") else written)
    if written.startswith("["):
        path.write_text(BASE.replace("[data]", written))
    message = error_of(path)
    assert expected in message
    assert str(path) in message
    assert message.count("\n") <= 1


def test_a_run_has_the_merged_config_and_resumes(extend, tmp_path):
    home = tmp_path / "run"
    path = extend(f'steps = 4\nhooks = []\n[run]\ndirectory = "{home}"')
    done = run("train", path)
    assert done.returncode == 0, done.stderr
    saved = (home / "config.toml").read_text()
    assert "extends" not in saved
    assert 'name = "momentum"' in saved
    assert "all 4 steps were taken before" in run("train", home).stdout
    path.write_text('extends = "nowhere.toml"')
    wrong = run("train", path)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 2
    assert wrong.stderr.startswith(f"ftrain: {tmp_path / 'nowhere.toml'}: there is no such file")


def test_the_shipped_config_adds_only_its_records():
    found = resolved(ROOT / "configs" / "digits_records.toml")
    base = resolved(ROOT / "configs" / "digits.toml")
    assert found["run"].pop("directory") == "runs/digits_records"
    assert found["model"].pop("records") == "data/digits"
    del base["run"]["directory"]
    base["model"].pop("records", None)
    assert found == base
