import io

import jax.numpy as jnp
import numpy as np
import pytest
from regression import init_params, loss_fn
from rich.console import Console

from ftrain import TrainState, every, make_step, optimizers
from ftrain.checkpoints import CheckpointManager
from ftrain.hooks import (
    CheckpointSaver,
    Evaluator,
    Logging,
    NonFiniteError,
    ProgressBar,
    StopAtStep,
    StopOnNaN,
    SummarySaver,
)
from ftrain.summaries import read_metrics
from ftrain.training import Loop, at
from ftrain.training.hook import StateSaver

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = optimizers.gradient_descent(0.1)


def drive(hooks, data, loss=loss_fn, **options) -> Loop:
    state = TrainState.create(
        init_params(), SGD, averages=options.pop("averages", None) is not None
    )
    with Loop(make_step(loss, SGD, **options), state, data, hooks=hooks) as loop:
        while not loop.should_stop():
            loop.advance()
    return loop


def log_lines(hooks, data, when) -> list[str]:
    lines = []
    drive([*hooks, Logging(when=when, write=lines.append)], data)
    return [line for line in lines if "fused into one call" not in line]  # depends on the time


@pytest.mark.parametrize("last", [1, 5])
def test_stop_at_step(pipeline, last):
    assert drive([StopAtStep(last)], pipeline).steps_taken == last


def test_a_run_that_has_come_so_far_takes_no_step(pipeline):
    class Late(StateSaver):
        def restore_state(self, like):
            return like.replace(step=jnp.int32(9))

    loop = drive([Late(), StopAtStep(5)], pipeline)
    assert loop.steps_taken == 9
    assert "step 5 was the last" in loop.stop_reason


def explode_at(step: int):
    def loss(params, batch, rng):
        value, metrics = loss_fn(params, batch, rng)
        return jnp.where(batch["number"][0] == step, jnp.nan, value), metrics

    return loss


def numbered(pipeline, count):
    return [pipeline.batch(n) | {"number": np.array([n + 1] * 8)} for n in range(count)]


@pytest.mark.parametrize("bad", [1, 7, 30])
def test_nan_is_named_with_its_own_step(pipeline, bad):
    with pytest.raises(NonFiniteError, match=f"loss is nan at step {bad};"):
        drive([StopOnNaN()], numbered(pipeline, 30), loss=explode_at(bad))


def test_a_gradient_that_is_not_finite_is_found_before_the_loss_shows_it(pipeline, tmp_path):
    def loss(params, batch, rng):
        value, metrics = loss_fn(params, batch, rng)
        return value + jnp.sqrt(
            jnp.abs(params["b"] * 0.0)
        ), metrics  # a finite loss with an infinite slope

    hooks = [StopOnNaN(), CheckpointSaver(tmp_path, when=every(steps=1))]
    with pytest.raises(NonFiniteError, match="gradient_norm is nan at step 1;"):
        drive(hooks, pipeline, loss=loss)
    assert CheckpointManager(tmp_path).steps() == []


def test_nothing_is_saved_after_nan(pipeline, tmp_path):
    hooks = [StopOnNaN(), CheckpointSaver(tmp_path, when=every(steps=5), keep=9)]
    with pytest.raises(NonFiniteError):
        drive(hooks, numbered(pipeline, 30), loss=explode_at(10))
    assert CheckpointManager(tmp_path).steps() == [5]


def test_logging_writes_when_due_and_once_at_the_end(pipeline):
    lines = log_lines([StopAtStep(25)], pipeline, every(steps=10))
    assert [line.split(":")[0] for line in lines] == ["step 10", "step 20", "step 25"]
    assert "loss " in lines[0]
    assert len(log_lines([StopAtStep(20)], pipeline, every(steps=10))) == 2


def test_evaluations_are_logged_with_the_metrics_of_their_step(pipeline):
    evaluator = Evaluator(
        lambda params: {"size": float(jnp.sum(params["w"] ** 2)), "words": "a b"}, when=at(10, 15)
    )
    lines = log_lines([evaluator, StopAtStep(20)], pipeline, every(steps=10))
    assert [line.split(":")[0] for line in lines] == ["step 10", "step 15", "step 20", "step 20"]
    assert "loss" in lines[0]
    assert "eval/size" in lines[0]
    assert "loss" not in lines[1]
    assert "eval/words: a b" in lines[1]
    assert "eval/size" not in lines[2]
    assert "eval/size" in lines[3]  # once more at the end


def test_an_interrupted_run_is_not_evaluated_at_its_end(pipeline):
    calls = []
    evaluator = Evaluator(lambda params: calls.append(1) or {"x": 0.0}, when=every(steps=1000))
    with Loop(
        make_step(loss_fn, SGD), TrainState.create(init_params(), SGD), pipeline, hooks=[evaluator]
    ) as loop:
        loop.step()
        loop.interrupt("SIGTERM")
    assert not calls


def test_averages_are_evaluated_if_asked_for(pipeline):
    seen = []
    evaluator = Evaluator(lambda params: seen.append(params) or {}, when=at(3), use_averages=True)
    loop = drive([evaluator, StopAtStep(3)], pipeline, averages=0.9)
    np.testing.assert_array_equal(seen[0]["w"], loop.state.averages["w"])
    with pytest.raises(ValueError, match="needs averages"):
        drive([evaluator, StopAtStep(3)], pipeline)


def test_summaries_are_written_when_due_and_at_the_end(pipeline, tmp_path):
    drive([SummarySaver(tmp_path, when=every(steps=10)), StopAtStep(25)], pipeline)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [10, 20, 25]
    assert {"loss", "learning_rate", "gradient_norm", "largest_error"} <= set(lines[0])
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


def test_a_saver_saves_when_due_and_at_the_end_and_resumes(pipeline, tmp_path):
    saver = CheckpointSaver(tmp_path, when=every(steps=10), keep=9)
    whole = drive([CheckpointSaver(tmp_path / "whole"), StopAtStep(35)], pipeline)
    drive([saver, StopAtStep(25)], pipeline)
    assert saver.manager.steps() == [10, 20, 25]
    resumed = drive(
        [CheckpointSaver(tmp_path, when=every(steps=10), keep=9), StopAtStep(35)], pipeline
    )
    assert resumed.start_step == 25
    assert saver.manager.steps() == [10, 20, 25, 30, 35]
    np.testing.assert_array_equal(whole.state.params["w"], resumed.state.params["w"])


def test_the_progress_bar_shows_where_a_run_is(pipeline):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    evaluator = Evaluator(lambda params: {"accuracy": 0.5}, when=at(10))
    drive([evaluator, ProgressBar(20, console, when=every(steps=5)), StopAtStep(20)], pipeline)
    shown = text.getvalue()
    assert "20/20" in shown
    for word in ("loss", "lr", "steps/s", "eval/accuracy 0.5"):
        assert word in shown
