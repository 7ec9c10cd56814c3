"""A task with an evaluation_source is evaluated by a config alone."""

import numpy as np
import pytest
import regression
from command import run, write_config

from ftrain.config import ConfigError, build, load, plan
from ftrain.summaries import read_metrics

MEASURED = 'task="regression:measured"'


def make_job(tmp_path, *overrides):
    config = write_config(tmp_path, steps=20, every=10)
    no_noise = config.read_text().replace("noise = 0.1", "")
    config.write_text(no_noise)
    return build(plan(load(config, [MEASURED, f"run.directory={tmp_path / 'run'}", *overrides])))


def test_the_batches_are_all_held_out_examples(tmp_path):
    job = make_job(tmp_path)
    data = job.evaluation_pipeline
    assert (data.batch_size, data.steps, data.shuffle, data.epochs) == (8, 3, False, 1)
    assert make_job(tmp_path, "evaluation.batch_size=21").evaluation_pipeline.steps == 1
    job.trace()
    expected = regression.make_arrays(85)["y"][64:]
    for sizes in ("5", "64"):
        job = make_job(tmp_path, f"evaluation.batch_size={sizes}")
        found = job.evaluator.measure(job.initial_state())
        assert found["eval/error"] == pytest.approx(np.abs(expected).mean(), rel=1e-6)
        assert found["eval/confusion"].sum() == 21


def test_it_is_evaluated_while_it_trains_and_by_the_command(tmp_path):
    config = write_config(tmp_path, steps=20, every=10)
    config.write_text(config.read_text().replace("noise = 0.1", ""))
    home = tmp_path / "run"
    done = run("train", config, MEASURED, f"run.directory={home}", "optimizer.learning_rate=0.3")
    assert done.returncode == 0, done.stderr
    assert "eval/confusion is not published: it has 25 values" in done.stdout
    lines = [line for line in read_metrics(home / "metrics.jsonl") if "eval/r2" in line]
    assert [line["step"] for line in lines] == [10, 20]
    assert {"eval/r2", "eval/error", "eval/recall/0", "eval/recall/1"} <= set(lines[0])
    assert lines[1]["eval/r2"] > lines[0]["eval/r2"]
    evaluated = run("eval", home)
    assert evaluated.returncode == 0, evaluated.stderr
    assert f"eval/r2 {lines[1]['eval/r2']:.4g}" in evaluated.stdout
    assert "eval/confusion: [[" in evaluated.stdout
    assert "eval/recall: [" in evaluated.stdout


def test_a_best_metric_that_is_not_measured_is_refused_before_the_run(tmp_path):
    best = ["checkpoint.keep_best=1", "checkpoint.best_mode=max"]
    make_job(tmp_path, *best, "checkpoint.best_metric=eval/recall/1").trace()
    make_job(tmp_path, *best, "checkpoint.best_metric=accuracy").trace()  # a hook may publish it
    job = make_job(tmp_path, *best, "checkpoint.best_metric=eval/r3")
    with pytest.raises(ConfigError, match=r"best_metric: .* no 'eval/r3'; there are eval/r2, "):
        job.trace()


@pytest.mark.campaign
def test_several_processes_measure_the_same(tmp_path):
    """The last batch has examples for the first process only."""
    config = write_config(tmp_path, steps=20, every=10)
    config.write_text(config.read_text().replace("noise = 0.1", ""))
    found = []
    for count in ("1", "2", "4"):
        home = tmp_path / count
        done = run("launch", "-n", count, config, MEASURED, f"run.directory={home}")
        assert done.returncode == 0, done.stdout + done.stderr
        found.append([line for line in read_metrics(home / "metrics.jsonl") if "eval/r2" in line])
    for lines in found[1:]:
        for line, expected in zip(lines, found[0], strict=True):
            for name in ("eval/r2", "eval/error", "eval/recall/1"):
                assert line[name] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.entry=eror"], "the evaluation of regression:measured fails: ValueError: metric "),
        (["evaluation.batch_size=0"], "batch_size must be >= 1, got 0"),
        (["evaluation.batch_sise=3"], "batch_size"),
    ],
)
def test_mistakes_are_errors_of_the_config(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_job(tmp_path, *overrides).trace()
    assert len(str(caught.value).splitlines()) <= 2


def test_a_batch_size_without_a_source(tmp_path):
    config = write_config(tmp_path, steps=20, every=10)
    with pytest.raises(ConfigError, match=r"evaluation.batch_size: .* has no evaluation_source"):
        build(plan(load(config, ["evaluation.batch_size=8"])))
