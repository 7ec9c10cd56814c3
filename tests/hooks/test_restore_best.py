"""restore_best: a run ends with its best weights, and its last state is still there to resume."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ftrain
from ftrain.checkpoints import CheckpointManager
from ftrain.hooks import CheckpointSaver

DATA = ftrain.data.ArraySource({"x": np.float32([[1.0]] * 8)})


def loss(params, batch, rng):
    # The parameter moves by -1 a step; the loss is smallest at 7.
    moved = jnp.sum(params["w"]) - jnp.sum(jnp.square(params["w"] - 7)) * 0
    return moved, {"distance": jnp.sum(jnp.square(params["w"] - 7))}


def train(home, steps, **saver):
    hook = CheckpointSaver(
        home / "checkpoints",
        when=ftrain.every(steps=1),
        keep=2,
        keep_best=1,
        best_metric="distance",
        best_mode="min",
        **saver,
    )
    return ftrain.train(
        loss,
        {"w": jnp.float32([10.0])},
        ftrain.data.Pipeline(DATA, batch_size=8),
        optimizer=optax.sgd(1.0),
        steps=steps,
        directory=home,
        hooks=[hook],
    )


def test_a_run_ends_with_its_best_state_and_resumes_from_its_last(tmp_path):
    plain = train(tmp_path / "plain", 6)
    assert (int(plain.step), float(plain.params["w"][0])) == (6, 4.0)
    state = train(tmp_path / "best", 6, restore_best=True)
    # The metrics of step 4 are those of the parameters before it: 10 - 3.
    assert (int(state.step), float(state.params["w"][0])) == (4, 6.0)
    manager = CheckpointManager(tmp_path / "best")
    assert (manager.latest(), manager.best(), manager.step_of("best")) == (6, 4, 4)
    assert float(manager.restore(like=plain).params["w"][0]) == 4.0
    train(tmp_path / "best", 9, restore_best=True)
    assert float(manager.restore(like=plain, step="latest").params["w"][0]) == 1.0
    assert int(manager.restore(like=plain, step="best").step) == 4


def test_an_interrupted_run_keeps_its_last_state(tmp_path):
    class Interrupt(ftrain.Hook):
        when = ftrain.at(6)

        def after_step(self, report):
            run.interrupt("test")

    saver = CheckpointSaver(
        tmp_path,
        when=ftrain.every(steps=1),
        keep_best=1,
        best_metric="distance",
        best_mode="min",
        restore_best=True,
    )
    step = ftrain.make_step(loss, optax.sgd(1.0))
    state = ftrain.TrainState.create({"w": jnp.float32([10.0])}, optax.sgd(1.0))
    with ftrain.Run(
        step, state, ftrain.data.Pipeline(DATA, batch_size=8), steps=9, hooks=[saver, Interrupt()]
    ) as run:
        while not run.should_stop():
            run.advance()
    assert int(run.state.step) == 6


def test_it_needs_to_know_what_is_best(tmp_path):
    with pytest.raises(ValueError, match=r"restore_best needs keep_best.*'eval/accuracy'"):
        CheckpointSaver(tmp_path, restore_best=True)


def test_without_the_metric_the_last_state_stays(tmp_path, capsys):
    saver = CheckpointSaver(
        tmp_path / "c", keep_best=1, best_metric="nothing", best_mode="min", restore_best=True
    )
    state = ftrain.train(
        loss,
        {"w": jnp.float32([10.0])},
        ftrain.data.Pipeline(DATA, batch_size=8),
        optimizer=optax.sgd(1.0),
        steps=3,
        hooks=[saver],
    )
    assert int(state.step) == 3
    assert (
        "the run keeps the state of step 3: no checkpoint has 'nothing'" in capsys.readouterr().out
    )
