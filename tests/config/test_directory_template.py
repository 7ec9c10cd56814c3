"""Keys of the config in the name of the run directory."""

from pathlib import Path

import pytest
from command import run

from ftrain.config import ConfigError, build, load, plan

CONFIG = """
task = "regression:regression"
steps = 20

[run]
directory = "runs/{task}-{optimizer.learning_rate}/{seed}"

[model]
where = "a/../b"

[data]
batch_size = 8

[optimizer]
name = "adam"
learning_rate = 0.01
"""


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def directory_of(path, *overrides) -> str:
    return plan(load(path, overrides)).calls["run"].arguments["directory"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "runs/regression-regression-0.01/0"),
        (["seed=3", "optimizer.learning_rate=1e-5"], "runs/regression-regression-1e-05/3"),
        (["run.directory=x-{data.batch_size}-{data.shuffle}"], "x-8-true"),
        (["run.directory=x/{model.where}"], "x/a-..-b"),
        (["run.directory=x/{model.sizes.1}"], "x/2"),
        (["run.directory=x/{{task}}"], "x/{task}"),
        (["run.directory={optimizer.beta1}"], "0.9"),  # a default
        (['hooks=[{name="StopWhen", metric="loss"}]', "run.directory={hooks.0.metric}"], "loss"),
        (
            ['task="regression:regression"', "run.directory=/tmp/{task}/x"],
            "/tmp/regression-regression/x",
        ),
    ],
)
def test_keys_become_values(config, overrides, expected):
    assert directory_of(config, *overrides) == expected


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        (
            "runs/{optimizer.learning_rat}",
            "the config has no such key; did you mean optimizer.learning_rate?",
        ),
        ("runs/{nothing}", "{nothing}: the config has no such key"),
        ("runs/{run.directory}", "{run.directory}: the config has no such key"),
        ("runs/{}", "{}: the config has no such key"),
        (
            "runs/{optimizer}",
            "is a table; expected a key with one value; write {optimizer.learning_rate}",
        ),
        ("runs/{model.sizes}", "{model.sizes} is an array; expected a key with one value"),
        ("runs/{task", "has unmatched braces"),
        ("runs/task}", "has unmatched braces"),
        ("runs/{seed:03d}", "has a format in braces; expected a key, {seed}"),
        ("runs/{seed!r}", "has a format in braces"),
        ("runs/{seed.real}", "{seed.real}: the config has no such key"),
        ("{task.__class__}", "the config has no such key"),
    ],
)
def test_mistakes_name_the_key(config, directory, expected):
    with pytest.raises(ConfigError) as caught:
        plan(load(config, [f"run.directory={directory}"]))
    message = str(caught.value)
    assert message.startswith("command line: run.directory: ")
    assert expected in message
    assert "\n" not in message


def test_no_value_leads_out_of_the_directory(config):
    for value in ("..", ".", "/", "///", ""):
        config.write_text(CONFIG.replace('"a/../b"', f'"{value}"'))
        if value == "":
            continue  # refused by the task
        with pytest.raises(ConfigError, match=r"run\.directory: "):
            plan(load(config, ["run.directory=runs/{model.where}"]))
    assert directory_of(config, "model.where=../../etc", "run.directory=r/{model.where}") == (
        "r/..-..-etc"
    )


def test_a_rate_that_is_a_schedule_is_a_table(config):
    schedule = (
        'optimizer.learning_rate={name="cosine_decay", learning_rate=0.1, decay_steps="100%"}'
    )
    with pytest.raises(ConfigError, match=r"write \{optimizer\.learning_rate\.learning_rate\}"):
        plan(load(config, [schedule]))
    name = "run.directory=r/{optimizer.learning_rate.name}-{optimizer.learning_rate.decay_steps}"
    assert directory_of(config, schedule, name) == "r/cosine_decay-100"


def test_a_length_in_epochs_is_named_as_such(config):
    config.write_text(CONFIG.replace("steps = 20", "epochs = 2"))
    assert directory_of(config, "run.directory=r/{epochs}") == "r/2"
    with pytest.raises(ConfigError, match=r"\{steps\} is not known yet: .* in epochs, \{epochs\}"):
        plan(load(config, ["run.directory=r/{steps}"]))
    assert build(plan(load(config, ["run.directory=r/{epochs}"]))).directory.name == "2"


def test_a_run_is_trained_checked_and_resumed_in_it(config, tmp_path):
    override = "run.directory=runs/{seed}-{{x}}"
    assert "runs/0-{x}" in run("check", config, override, cwd=tmp_path).stdout
    done = run("train", config, override, "steps=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    home = tmp_path / "runs" / "0-{x}"
    assert (home / "config.toml").is_file()
    again = run("train", home, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "all 3 steps were taken before" in again.stdout
    assert "the run was moved" not in again.stdout
    evaluated = run("eval", home, cwd=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["0-{x}"]
