"""The length of a run, in steps or epochs, and numbers of steps as shares of it."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from command import run

import ftrain
from ftrain.config import ConfigError, build, claim, load, plan
from ftrain.config.run_directory import compare
from ftrain.data import ArraySource, Buckets, Pipeline
from ftrain.schedules import resolve_steps

CONFIG = """
task = "regression:regression"
epochs = 5

[data]
batch_size = 12

[optimizer]
name = "momentum"
momentum = 0.9
learning_rate = { name = "cosine_decay", learning_rate = 0.1, decay_steps = "100%" }

[evaluation]
every_steps = "50%"
"""
STEPS = 5 * 64 // 12
SHARES = """
task = "regression:regression"
steps = 200

[data]
batch_size = 8

[[hooks]]
name = "Profiler"
at_steps = ["50%", 120]

[optimizer]
name = "adam"

[optimizer.learning_rate]
name = "warmup"
warmup_steps = "10%"

[optimizer.learning_rate.schedule]
name = "piecewise_constant"
boundaries = ["50%", "75%"]
values = [1.0, 0.5, 0.25]
"""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def built(path, *overrides):
    return build(plan(load(path, overrides)))


def message_of(path, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        built(path, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_epochs_become_steps_of_the_pipeline(config):
    job = built(config)
    assert job.steps == STEPS
    resolved = job.plan.resolved()
    assert resolved["steps"] == STEPS
    assert "epochs" not in resolved
    assert job.learning_rate(STEPS) == pytest.approx(0.0, abs=1e-8)
    assert job.evaluator.when.steps == 13
    assert built(config, 'data.last="keep"').steps == 27
    assert built(config, "epochs=0.5").steps == 2


def test_the_resolved_config_builds_the_same_job_and_keeps_its_shares(config):
    job = built(config)
    resolved = job.plan.resolved()
    assert resolved["optimizer"]["learning_rate"]["decay_steps"] == "100%"
    assert resolved["evaluation"]["every_steps"] == "50%"
    again = config.with_name("again.toml")
    again.write_text(tomli_w.dumps(resolved))
    same = built(again)
    assert same.plan.resolved() | {"run": None} == resolved | {"run": None}
    assert float(same.learning_rate(7)) == float(job.learning_rate(7))
    longer = built(again, "epochs=10")
    assert longer.steps == 10 * 64 // 12
    assert float(longer.learning_rate(STEPS)) == pytest.approx(0.05, rel=0.05)


def test_the_command_line_and_an_extending_config_replace_the_length(config):
    assert built(config, "steps=40").steps == 40
    assert float(built(config, "steps=40").learning_rate(20)) == pytest.approx(0.05)
    child = config.with_name("child.toml")
    child.write_text('extends = "job.toml"\nsteps = 30\n')
    assert built(child).steps == 30
    assert built(child, "epochs=1").steps == 5


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["steps=10", "epochs=2"], "steps: is set and so is epochs: keep one of them"),
        (["epochs=0"], "command line: epochs: must be above 0, got 0"),
        (["epochs=nan"], "epochs: must be a valid integer or must be a finite number, got nan"),
        (["epochs=many"], "epochs: "),
        (["epochs=true"], "epochs: "),
        (["epochs=0.01"], "epochs: 0.01 epochs of "),
        (["data.epochs=2"], "epochs: the data end after 2 epochs, got epochs 5"),
        (["steps=0"], "steps: must be at least 1, got 0"),
        (['steps="50%"'], "steps: "),
        (['evaluation.every_steps="5"'], "evaluation.every_steps: "),
        (['data.batch_size="50%"'], "data.batch_size: "),
        (['model.every_steps="50%"'], "model.every_steps: "),
    ],
)
def test_mistakes_name_their_key(config, overrides, expected):
    assert expected in message_of(config, *overrides)


def test_a_length_is_needed(config):
    config.write_text(CONFIG.replace("epochs = 5\n", ""))
    expected = "steps: is missing: set the length of the run in steps or in epochs"
    assert expected in message_of(config)


def test_shares_stand_in_arrays_hooks_and_nested_tables(config):
    config.write_text(SHARES)
    job = built(config)
    rates = [float(job.learning_rate(step)) for step in (10, 50, 101, 199)]
    assert rates == [0.5, 1.0, 0.5, 0.25]
    resolved = job.plan.resolved()
    assert resolved["hooks"][0]["at_steps"] == ["50%", 120]
    assert resolved["optimizer"]["learning_rate"]["schedule"]["boundaries"] == ["50%", "75%"]
    assert resolved["optimizer"]["learning_rate"]["warmup_steps"] == "10%"


def test_another_length_is_reported_with_what_depends_on_it(config, tmp_path):
    directory = tmp_path / "run"
    job = built(config, f"run.directory={directory}")
    claim(directory, job.plan.resolved()).close()
    (directory / "checkpoints" / "5").mkdir(parents=True)
    assert compare(directory, job.plan.resolved()) == []
    longer = built(config, f"run.directory={directory}", "epochs=6").plan.resolved()
    assert compare(directory, longer) == [
        "steps was 26, now 32",
        "optimizer.learning_rate.decay_steps was 26, now 32",
        "evaluation.every_steps was 13, now 16",
    ]
    number = built(config, "optimizer.learning_rate.decay_steps=26").plan.resolved()
    assert compare(directory, number) == []  # says the same in another way


def test_a_run_of_epochs_is_extended_by_more(config, tmp_path):
    directory = tmp_path / "run"
    override = f"run.directory={directory}"
    first = run("train", config, override, "epochs=2")
    assert first.returncode == 0, first.stderr
    assert "10 steps of 12" in first.stdout
    saved = tomllib.loads((directory / "config.toml").read_text())
    assert saved["steps"] == 10
    refused = run("train", config, override, "epochs=4")
    assert refused.returncode == 2
    assert "steps was 10, now 21" in refused.stderr
    more = run("train", directory, "epochs=4", "--accept-changes")
    assert more.returncode == 0, more.stderr
    assert "done: 11 steps" in more.stdout
    shown = run("check", config, override, "epochs=4")
    assert "21, 3.9 epochs" in shown.stdout


def test_the_schedule_is_drawn_over_the_epochs(config, tmp_path):
    done = run("schedule", config, "-o", tmp_path / "rate.png")
    assert done.returncode == 0, done.stderr
    assert "over 26 steps" in done.stdout


def test_python_says_the_length_in_epochs_too(pipeline):
    from regression import init_params, loss_fn

    optimizer = ftrain.optimizers.gradient_descent(0.1)
    train = ftrain.train
    state = train(loss_fn, init_params(), pipeline, optimizer=optimizer, epochs=1.5)
    assert int(state.step) == 12
    with pytest.raises(ValueError, match="pass steps or epochs, not both"):
        train(loss_fn, init_params(), pipeline, optimizer=optimizer, epochs=1, steps=3)
    with pytest.raises(TypeError, match=r"epochs needs a Pipeline, .* got list; pass steps"):
        train(loss_fn, init_params(), [], optimizer=optimizer, epochs=1)


def test_epochs_of_buckets_are_counted_bucket_by_bucket():
    lengths = np.array([1] * 10 + [5] * 7)
    source = ArraySource({"x": np.arange(17)})
    counts = {"drop": 10 * 3 // 4 + 7 * 3 // 4, "keep": 8 + 6, "pad": 8 + 6}
    for last, expected in counts.items():
        buckets = Buckets(lengths, [2, 8])
        endless = Pipeline(source, batch_size=4, buckets=buckets, last=last)
        limited = Pipeline(source, batch_size=4, buckets=buckets, last=last, epochs=3)
        assert endless.count_steps(3) == limited.steps == expected


@pytest.mark.parametrize(
    ("length", "expected"),
    [("100%", 2000), ("5%", 100), ("0.01%", 1), ("0%", 0), (" 12.5 % ", 250), (7, 7)],
)
def test_resolve_steps(length, expected):
    assert resolve_steps(length, 2000) == expected


@pytest.mark.parametrize("length", ["half", "5", "-5%", "%", "5%%", "1e2%"])
def test_what_is_no_share_is_refused(length):
    with pytest.raises(ValueError, match="expected a number of steps, or a share of the run"):
        resolve_steps(length, 2000)
