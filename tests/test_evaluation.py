import threading

import jax.numpy as jnp
import numpy as np
import pytest
from regression import init_params, loss_fn

import ftrain
from ftrain.checkpoints import CheckpointManager, checkpoints_iterator, wait_for_checkpoint
from ftrain.hooks import CheckpointSaver, Logging
from ftrain.summaries import read_metrics

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = ftrain.optimizers.gradient_descent(0.1)


def make_state():
    return ftrain.TrainState.create(init_params(), SGD)


def evaluate(params):
    return {"w": float(jnp.sum(params["w"]))}


def test_each_new_checkpoint_is_evaluated_until_the_last_step(tmp_path):
    manager = CheckpointManager(tmp_path, keep=9)
    state = make_state()
    manager.save(10, state)
    seen = []
    for step, measured in ftrain.evaluate_checkpoints(
        tmp_path, evaluate, make_state(), last_step=30, write_to=tmp_path / "eval", timeout=60
    ):
        seen.append((step, measured["eval/w"]))
        if step < 30:
            state = state.replace(params=state.params | {"w": state.params["w"] + 1})
            manager.save(step + 10, state)
    assert seen == [(10, 0.0), (20, 3.0), (30, 6.0)]
    assert [line["step"] for line in read_metrics(tmp_path / "eval" / "metrics.jsonl")] == [
        10,
        20,
        30,
    ]


def test_it_ends_when_nothing_new_appears(tmp_path):
    CheckpointManager(tmp_path).save(10, make_state())
    assert [
        step
        for step, _ in ftrain.evaluate_checkpoints(tmp_path, evaluate, make_state(), timeout=0.05)
    ] == [10]


def test_a_checkpoint_that_was_deleted_meanwhile_is_passed_over(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, keep=9)
    manager.save(10, make_state())
    restore = CheckpointManager.restore

    def delete_first(self, like, step=None):
        if step == 10:
            manager.save(20, make_state())
            manager.delete(10)
        return restore(self, like, step)

    monkeypatch.setattr(CheckpointManager, "restore", delete_first)
    assert [
        step
        for step, _ in ftrain.evaluate_checkpoints(tmp_path, evaluate, make_state(), timeout=0.05)
    ] == [20]


def test_averages_are_evaluated_if_asked_for(tmp_path):
    state = make_state().replace(averages={"w": jnp.ones(3), "b": jnp.zeros(())})
    CheckpointManager(tmp_path).save(1, state)
    evaluated = ftrain.evaluate_checkpoints(
        tmp_path, evaluate, state, use_averages=True, timeout=0.05
    )
    assert list(evaluated) == [(1, {"eval/w": 3.0})]


def test_a_run_in_another_thread_is_followed(pipeline, tmp_path):
    hooks = [
        CheckpointSaver(tmp_path / "checkpoints", when=ftrain.every(steps=50)),
        Logging(write=lambda line: None),
    ]
    options = {"optimizer": SGD, "steps": 200, "directory": tmp_path, "hooks": hooks}
    thread = threading.Thread(
        target=ftrain.train, args=(loss_fn, init_params(), pipeline), kwargs=options
    )
    thread.start()
    evaluated = dict(
        ftrain.evaluate_checkpoints(
            tmp_path / "checkpoints", evaluate, make_state(), last_step=200, timeout=60
        )
    )
    thread.join()
    assert max(evaluated) == 200
    assert np.isclose(evaluated[200]["eval/w"], -0.5, atol=0.01)


def test_waiting_for_a_checkpoint(tmp_path):
    assert wait_for_checkpoint(tmp_path, timeout=0.02) is None
    assert wait_for_checkpoint(tmp_path, stop=lambda: True) is None
    CheckpointManager(tmp_path).save(3, {"x": jnp.ones(2)})
    assert wait_for_checkpoint(tmp_path) == 3
    assert wait_for_checkpoint(tmp_path, after=3, timeout=0.02) is None
    assert list(checkpoints_iterator(tmp_path, timeout=0.02)) == [3]


def test_a_checkpoint_that_is_saved_just_before_the_run_ends_is_not_missed(tmp_path):
    """It appears after the directory is listed, before the run is asked whether it has ended."""
    manager = CheckpointManager(tmp_path)
    manager.save(10, make_state())

    def has_ended():
        if manager.latest() == 10:
            manager.save(15, make_state())
            return True
        return True

    evaluated = ftrain.evaluate_checkpoints(
        tmp_path, evaluate, make_state(), last_step=100, stop=has_ended
    )
    assert [step for step, _ in evaluated] == [15]
    assert wait_for_checkpoint(tmp_path, after=10, timeout=0) == 15
