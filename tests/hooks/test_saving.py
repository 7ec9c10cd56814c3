"""The saver in a run: which checkpoints it keeps, and what happens when one cannot be written."""

import shutil

import jax.numpy as jnp
import pytest
from regression import init_params, loss_fn

from ftrain import TrainState, every, make_step, optimizers
from ftrain.checkpoints import CheckpointManager, SaveError
from ftrain.hooks import CheckpointSaver, Evaluator, Logging, StopAtStep
from ftrain.training import Hook, Loop

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = optimizers.gradient_descent(0.1)


def drive(hooks, data, loss=loss_fn) -> list[str]:
    """Train, and answer with what is told on the way."""
    lines: list[str] = []
    state = TrainState.create(init_params(), SGD)
    logging = Logging(when=every(steps=1000), write=lines.append)
    with Loop(make_step(loss, SGD), state, data, hooks=[*hooks, logging]) as loop:
        while not loop.should_stop():
            loop.advance()
    return lines


class Vanish(Hook):
    """Take the directory of checkpoints away at one step, and bring it back at another."""

    def __init__(self, saver: CheckpointSaver, gone: int, back: int):
        self.manager = saver.manager
        self.directory = saver.manager.directory
        self.gone = gone
        self.back = back
        self.when = every(steps=1)

    def after_step(self, report):
        if report.step == self.gone:
            self.manager.wait()
            self.directory.rename(self.directory.with_name("away"))
        if report.step == self.back:
            self.directory.with_name("away").rename(self.directory)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


def test_a_checkpoint_that_cannot_be_written_ends_the_run(pipeline, directory):
    saver = CheckpointSaver(directory, when=every(steps=5))
    with pytest.raises(SaveError, match=r"10 was not saved: .*checkpoints no longer exists"):
        drive([saver, StopAtStep(20), Vanish(saver, 7, 99)], pipeline)
    assert CheckpointManager(directory.with_name("away")).steps() == [5]


def test_a_run_goes_on_without_it_if_the_config_says_so(pipeline, directory):
    saver = CheckpointSaver(directory, when=every(steps=5), on_error="continue", keep=9)
    lines = drive([saver, StopAtStep(20), Vanish(saver, 7, 12)], pipeline)
    told = [line for line in lines if "was not saved" in line]
    assert len(told) == 1
    assert "10 was not saved" in told[0]
    assert told[0].endswith("training continues")
    assert CheckpointManager(directory).steps() == [5, 15, 20]


def test_the_best_by_an_evaluation_is_kept(pipeline, directory):
    scores = iter([0.1, 0.9, 0.5, 0.4, 0.3])
    evaluator = Evaluator(lambda params: {"score": next(scores)}, when=every(steps=5))
    saver = CheckpointSaver(
        directory,
        when=every(steps=5),
        keep=1,
        keep_best=1,
        best_metric="eval/score",
        best_mode="max",
    )
    lines = drive([evaluator, saver, StopAtStep(25)], pipeline)
    assert saver.manager.steps() == [10, 25]
    assert saver.manager.best() == 10
    assert not [line for line in lines if "best_metric" in line]


def test_a_metric_that_is_not_known_is_told_once(pipeline, directory):
    saver = CheckpointSaver(
        directory,
        when=every(steps=5),
        keep=1,
        keep_best=1,
        best_metric="eval/scroe",
        best_mode="max",
    )
    lines = drive([saver, StopAtStep(15)], pipeline)
    told = [line for line in lines if "best_metric" in line]
    assert len(told) == 1
    assert "'eval/scroe' is missing at step 5" in told[0]
    assert "loss" in told[0]


def test_a_state_that_is_not_finite_is_put_aside_and_told(pipeline, directory):
    def loss(params, batch, rng):
        value, metrics = loss_fn(params, batch, rng)
        return value / jnp.where(
            jnp.abs(params["b"]).sum() > 0, 0.0, 1.0
        ), metrics  # infinite from the second step on

    lines = drive([CheckpointSaver(directory, when=every(steps=1)), StopAtStep(3)], pipeline, loss)
    assert CheckpointManager(directory).steps() == [1]
    assert [line for line in lines if "suspect has non-finite leaves: params/b" in line]
    assert (directory / "3.suspect").is_dir()


def test_a_save_that_was_never_finished_is_told(pipeline, directory):
    drive([CheckpointSaver(directory, when=every(steps=5)), StopAtStep(5)], pipeline)
    shutil.copytree(directory / "5", directory / "8.saving.orbax-checkpoint-tmp")
    lines = drive([CheckpointSaver(directory, when=every(steps=5)), StopAtStep(10)], pipeline)
    assert "the save of step 8 was never finished; the run resumes from step 5" in lines
    assert not list(directory.glob("8*"))


def test_a_run_resumes_from_the_one_before_a_damaged_checkpoint(pipeline, directory):
    drive([CheckpointSaver(directory, when=every(steps=5)), StopAtStep(10)], pipeline)
    (directory / "10" / "state" / "manifest.ocdbt").write_bytes(b"")
    with pytest.warns(UserWarning, match="10 is damaged: file state/manifest.ocdbt has 0 bytes"):
        drive([CheckpointSaver(directory, when=every(steps=5)), StopAtStep(10)], pipeline)
    assert CheckpointManager(directory).steps() == [5, 10]
    assert (directory / "10.damaged").is_dir()


def test_what_to_do_about_an_error_is_one_of_two(directory):
    with pytest.raises(ValueError, match="on_error must be 'stop' or 'continue', got 'ignore'"):
        CheckpointSaver(directory, on_error="ignore")
