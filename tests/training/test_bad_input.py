"""What users get wrong, and what they are told."""

import jax.numpy as jnp
import numpy as np
import pytest
from regression import init_params, loss_fn

import ftrain
from ftrain import Hook, TrainState, make_step, optimizers
from ftrain.hooks import StopAtStep
from ftrain.training import Loop, at

pytestmark = pytest.mark.usefixtures("no_thread_left")
ADAM = optimizers.adam(0.05)
STEP = make_step(loss_fn, ADAM)


def drive(data, step=STEP, hooks=(), **options):
    with Loop(step, TrainState.create(init_params(), ADAM), data, hooks=hooks, **options) as loop:
        while not loop.should_stop():
            loop.advance()
    return loop


def changed(change):
    def step(state, batch):
        state, metrics = STEP(state, batch)
        return change(state), metrics

    return step


@pytest.mark.parametrize("fuse", [1, 5])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.replace(
                params=state.params | {"w": state.params["w"].astype(jnp.bfloat16)}
            ),
            r"leaf params/w is bfloat16\[3\] after it, and float32\[3\] before",
        ),
        (
            lambda state: state.replace(params={"w": state.params["w"]}),
            r"leaf params/b is missing after it, and float32\[\] before",
        ),
        (
            lambda state: state.replace(model_state={"mean": jnp.zeros(2)}),
            r"leaf model_state/mean is float32\[2\] after it, and missing before",
        ),
        (
            lambda state: state.replace(params=state.params | {"w": jnp.zeros(4)}),
            r"leaf params/w is float32\[4\] after it",
        ),
    ],
)
def test_a_step_that_changes_its_state(pipeline, change, message, fuse):
    with pytest.raises(TypeError, match=message):
        drive(pipeline, changed(change), fuse=fuse)


def test_a_step_with_a_metric_that_is_no_scalar(pipeline):
    def step(state, batch):
        state, metrics = STEP(state, batch)
        return state, metrics | {"errors": jnp.zeros(8)}

    with pytest.raises(
        ValueError, match=r"metric errors must be a scalar, got shape \(8,\); take its mean"
    ):
        drive(pipeline, step)


def test_a_step_without_metrics_is_fine(pipeline):
    assert (
        drive(
            pipeline, lambda state, batch: (STEP(state, batch)[0], {}), [StopAtStep(30)], fuse=4
        ).steps_taken
        == 30
    )


@pytest.mark.parametrize("fuse", [1, 4])
def test_a_batch_of_another_dtype(pipeline, fuse):
    batches = [pipeline.batch(step) for step in range(9)]
    batches[6]["y"] = batches[6]["y"].astype(np.int32)
    with pytest.raises(
        ValueError,
        match=r"batch of step 7 differs .* in dtype: y is int32\[8\], it was float32\[8\]",
    ):
        drive(batches, fuse=fuse)


@pytest.mark.parametrize("fuse", [1, 4])
def test_a_batch_of_other_names(pipeline, fuse):
    batches = [pipeline.batch(step) for step in range(9)]
    del batches[5]["y"]
    with pytest.raises(
        ValueError, match="the batch of step 6 has x, expected x, y as in the first one"
    ):
        drive(batches, fuse=fuse)


@pytest.mark.parametrize("fuse", [1, 4, "auto"])
def test_a_smaller_last_batch_is_trained_on_and_said(pipeline, fuse):
    batches = [pipeline.batch(step) for step in range(11)]
    batches[-1] = {name: array[:3] for name, array in batches[-1].items()}
    with pytest.warns(
        UserWarning, match=r"batch of step 11 .* x is float32\[3, 3\], it was float32\[8, 3\]"
    ):
        loop = drive(batches, fuse=fuse)
    assert loop.steps_taken == 11
    assert loop.stop_reason == "the data ended"


def test_an_iterator_that_ends_early_is_said(pipeline, capsys):
    batches = [pipeline.batch(step) for step in range(3)]
    state = ftrain.train(loss_fn, init_params(), batches, optimizer=ADAM, steps=50)
    assert int(state.step) == 3
    assert "the data ended after step 3, before step 50" in capsys.readouterr().out


def test_no_data_at_all(capsys):
    assert int(ftrain.train(loss_fn, init_params(), [], optimizer=ADAM, steps=5).step) == 0
    assert "the data ended after step 0, before step 5" in capsys.readouterr().out


def test_data_that_are_no_data():
    with pytest.raises(
        TypeError, match="data must be a Pipeline or an iterable of batches, got int"
    ):
        drive(7)


def test_a_hook_that_raises_keeps_what_was_saved(pipeline, tmp_path):
    class Failing(Hook):
        when = at(25)

        def after_step(self, report):
            raise RuntimeError("hook failed")

    saver = ftrain.hooks.CheckpointSaver(tmp_path, when=ftrain.every(steps=10))
    with pytest.raises(RuntimeError, match="hook failed"):
        drive(pipeline, hooks=[Failing(), saver])
    assert saver.manager.steps() == [10, 20]
