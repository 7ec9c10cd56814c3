"""A run that fails, seen again; a run that is followed; and where the time went."""

import re

import pytest
from command import run, start, write_config

from ftrain.summaries import read_metrics


def exploding_run(tmp_path, *more):
    config = write_config(tmp_path, steps=100, every=3)
    arguments = [
        "task=regression:exploding",
        "model={at=8}",
        "optimizer={name='gradient_descent', learning_rate=1.0}",
    ]
    return run("train", config, *arguments, f"run.directory={tmp_path / 'run'}", *more)


@pytest.mark.parametrize("fuse", ["1", "10"])
def test_a_nan_is_kept_and_can_be_seen_again(tmp_path, fuse):
    home = tmp_path / "run"
    failed = exploding_run(tmp_path, f"step.fuse={fuse}")
    assert failed.returncode == 1
    assert "gradient_norm is nan at step 8;" in failed.stderr
    assert f"kept in {home}/crash/8; to take the step again: ftrain replay {home}" in failed.stderr
    assert "Traceback" not in failed.stderr

    replayed = run("replay", home)
    assert replayed.returncode == 0, replayed.stderr
    lines = replayed.stdout.splitlines()
    assert lines[0].startswith("step 8 failed: NonFiniteError: gradient_norm is nan at step 8")
    assert "first non-finite: gradients/count (nan)" in lines

    slowly = run("replay", home, "--step", "8", "--no-jit")
    assert re.search(
        r"the first NaN comes out of \w+\(.*\)\n  in .*regression\.py, line \d+, in \S*loss",
        slowly.stdout,
    )


def test_there_must_be_something_to_see(tmp_path):
    config = write_config(tmp_path, steps=20, every=10)
    home = tmp_path / "run"
    assert run("train", config, f"run.directory={home}").returncode == 0
    answer = run("replay", home)
    assert answer.returncode == 2
    assert (
        answer.stderr
        == f"ftrain: {home}: there is no crash to replay; {home / 'crash'} has no bundle\n"
    )
    answer = run("replay", tmp_path / "nowhere")
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1


def test_another_crash_is_named(tmp_path):
    exploding_run(tmp_path)
    answer = run("replay", tmp_path / "run", "--step", "3")
    assert answer.returncode == 2
    assert "there is no crash of step 3; the steps with one are 8" in answer.stderr


def test_a_run_is_followed_to_its_last_step(tmp_path):
    config = write_config(tmp_path, steps=4000, every=1000)
    home = tmp_path / "run"
    training = start("train", config, f"run.directory={home}")
    for line in training.stdout:
        if line.startswith("first step"):
            break
    followed = run("eval", home, "--follow", "--timeout", "60")
    training.communicate(timeout=60)
    assert followed.returncode == 0, followed.stderr
    steps = [int(line.split()[1].rstrip(":")) for line in followed.stdout.splitlines()]
    assert steps == sorted(set(steps))
    assert steps[-1] == 4000
    assert list((home / "eval").glob("events.out.tfevents.*"))


@pytest.mark.campaign
def test_following_a_run_that_stopped_early_ends_and_keeps_what_was_measured(tmp_path):
    config = write_config(tmp_path, steps=40, every=20)
    home = tmp_path / "run"
    assert run("train", config, f"run.directory={home}").returncode == 0
    assert run("eval", home, "--follow").stdout.startswith("step 40:")
    config = write_config(tmp_path, steps=4000, every=20)
    stop = "hooks=[{name='StopAtStep', last_step=60}]"
    done = run("train", config, f"run.directory={home}", stop, "--accept-changes")
    assert "stopped at step 60 of 4000 (step 60 was the last one asked for)\n" in done.stdout, (
        done.stderr
    )
    followed = run("eval", home, "--follow")
    assert followed.returncode == 0, followed.stderr
    assert [line["step"] for line in read_metrics(home / "eval" / "metrics.jsonl")] == [40, 60]


def test_following_and_a_step_exclude_each_other(tmp_path):
    answer = run("eval", tmp_path, "--follow", "--step", "3")
    assert answer.returncode == 2
    assert "--step and --follow exclude each other" in answer.stderr


def test_timing_shows_where_the_time_went(tmp_path):
    config = write_config(tmp_path, steps=200, every=50)
    done = run("train", config, f"run.directory={tmp_path / 'run'}", "--timing")
    table = done.stdout.partition("where the time went:\n")[2]
    names = {line[2:26].strip() for line in table.splitlines() if line.startswith("  ")}
    assert {
        "waiting for data",
        "dispatching steps",
        "waiting for the device",
        "compiling",
        "starting",
    } <= names
    assert {
        "CheckpointSaver",
        "Evaluator",
        "Logging",
        "SummarySaver",
        "StopOnNaN",
        "StepCounter",
    } <= names
    shares = [float(share) for share in re.findall(r"([\d.]+)%", table)]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_hooks_of_a_config_are_used(tmp_path):
    config = write_config(tmp_path, steps=500, every=10)
    config.write_text(
        config.read_text().replace(
            "[evaluation]", 'listeners = ["regression:Printing"]\n\n[evaluation]'
        )
        + '\n[[hooks]]\nname = "StopWhen"\nmetric = "eval/distance"\nthreshold = 1.9\n'
        + '\n[[hooks]]\nname = "Callback"\nfunction = "regression:note"\nevery_steps = 10\n'
    )
    done = run("train", config, f"run.directory={tmp_path / 'run'}", "log.every_steps=10")
    assert done.returncode == 0, done.stderr
    assert "saved 10" in done.stdout
    assert "noted 10" in done.stdout
    assert re.search(r"stopped at step \d+ of 500 \(eval/distance is 1\.\d+ at step", done.stdout)


STOP = """
[[hooks]]
name = "StopWhen"
metric = "eval/distance"
mode = "max"
patience = 3

[[hooks]]
name = "Profiler"
every_steps = 20
steps = 2
"""


def test_a_run_that_stopped_early_takes_no_further_step(tmp_path):
    config = write_config(tmp_path, steps=500, every=10)
    home = tmp_path / "run"
    config.write_text(config.read_text() + STOP)
    first = run("train", config, f"run.directory={home}")
    assert first.returncode == 0, first.stderr
    assert (
        "stopped at step 40 of 500 (eval/distance has not improved 3 times in a row by step 40;"
        in first.stdout
    )
    again = run("train", config, f"run.directory={home}")
    assert again.returncode == 0, again.stderr
    last = again.stdout.splitlines()[-1]
    assert last.startswith(
        "no further step: the run ended at step 40 of 500 (eval/distance has not improved 3 times"
    )
    assert sorted(path.name for path in home.glob("plugins/profile/*")) == [
        "step_00000020",
        "step_00000040",
    ]


def test_a_metric_that_the_guard_cannot_watch_is_a_mistake_of_the_user(tmp_path):
    config = write_config(tmp_path, steps=20, every=10)
    config.write_text(config.read_text() + '\n[[hooks]]\nname = "StopOnNaN"\nmetrics = ["los"]\n')
    done = run("train", config, f"run.directory={tmp_path / 'run'}")
    assert done.returncode == 2, done.stderr
    assert "StopOnNaN cannot watch los: the step has no such metric; it has loss," in done.stderr
    assert "Traceback" not in done.stderr
