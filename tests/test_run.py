import os
import signal

import jax
import numpy as np
import optax
import pytest
from regression import WEIGHTS, init_params, loss_fn, make_arrays

import ftrain
from ftrain.checkpoints import CheckpointManager
from ftrain.hooks import (
    CheckpointSaver,
    CrashBundle,
    DataFingerprint,
    Evaluator,
    Logging,
    StepCounter,
    StopOnNaN,
    SummarySaver,
)
from ftrain.summaries import read_metrics

pytestmark = pytest.mark.usefixtures("no_thread_left")
MOMENTUM = ftrain.optimizers.momentum(0.05, 0.9)
QUIET = Logging(write=lambda line: None)


def test_train_learns_and_returns_the_final_state(pipeline, capsys):
    state = ftrain.train(loss_fn, init_params(), pipeline, optimizer=MOMENTUM, steps=300)
    np.testing.assert_allclose(state.params["w"], WEIGHTS, atol=1e-3)
    assert int(state.step) == 300
    assert "step 300: loss" in capsys.readouterr().out


def test_train_carries_a_model_state_and_takes_every_option_of_a_loop(pipeline, tmp_path):
    def counting(params, batch, rng, model_state):
        loss, metrics = loss_fn(params, batch, rng)
        return loss, metrics, {"batches": model_state["batches"] + 1}

    def train(steps):
        return ftrain.train(
            counting,
            init_params(),
            pipeline,
            optimizer=MOMENTUM,
            model_state={"batches": 0},
            steps=steps,
            directory=tmp_path,
            hooks=[QUIET],
            prepare=lambda step, batch: batch | {"x": batch["x"] * 0.5},
            recoveries=0,
        )

    train(20)
    state = train(30)
    assert int(state.model_state["batches"]) == 30
    halved = ftrain.train(loss_fn, init_params(), pipeline, optimizer=MOMENTUM, steps=30)
    assert not np.allclose(state.params["w"], halved.params["w"])


def test_a_directory_holds_checkpoints_summaries_and_metrics(pipeline, tmp_path):
    ftrain.train(
        loss_fn,
        init_params(),
        pipeline,
        optimizer=MOMENTUM,
        steps=120,
        directory=tmp_path,
        hooks=[QUIET],
    )
    names = sorted(path.name.split(".")[0] for path in tmp_path.iterdir())
    assert names == ["checkpoints", "data", "events", "metrics", "run"]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [100, 120]


def test_the_same_call_goes_on_where_it_stopped(pipeline, tmp_path):
    def run(steps, directory):
        return ftrain.train(
            loss_fn,
            init_params(),
            pipeline,
            optimizer=MOMENTUM,
            steps=steps,
            directory=directory,
            hooks=[QUIET],
        )

    whole = run(90, tmp_path / "whole")
    run(40, tmp_path / "parts")
    resumed = run(90, tmp_path / "parts")
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"batch_size": 4}, "batch_size was 8, now 4"),
        ({"seed": 9}, "seed was 3"),
        ({"examples": 32}, "examples was 64"),
    ],
)
def test_going_on_with_other_data_is_refused_and_told_if_accepted(
    pipeline, tmp_path, change, reported
):
    def run(data, steps, **options):
        options |= {"optimizer": MOMENTUM, "steps": steps, "directory": tmp_path, "hooks": [QUIET]}
        ftrain.train(loss_fn, init_params(), data, **options)

    run(pipeline, 10)
    run(pipeline, 20)  # without a warning
    options = {"batch_size": 8, "seed": 3, "examples": 64} | change
    other = ftrain.data.Pipeline(
        ftrain.data.ArraySource(make_arrays(options.pop("examples"))), **options
    )
    with pytest.raises(ftrain.training.RunMismatchError, match=f"data: {reported}"):
        run(other, 30)
    with pytest.warns(
        UserWarning, match=f"resumes at step 20 with other data than it started with: {reported}"
    ):
        run(other, 30, accept_changes=True)


def test_the_control_may_stay_in_the_users_hands(pipeline):
    step = ftrain.make_step(loss_fn, MOMENTUM)
    state = ftrain.TrainState.create(init_params(), MOMENTUM)
    losses = []
    with ftrain.Run(step, state, pipeline, steps=50, hooks=[QUIET]) as run:
        while not run.should_stop():
            run.step()
            losses.append(run.report().read("loss"))
    assert len(losses) == 50
    assert losses[-1] < losses[0] / 10


def test_a_hook_takes_the_place_of_the_default_of_its_class(pipeline, tmp_path):
    saver = CheckpointSaver(tmp_path / "elsewhere", when=ftrain.every(steps=10))
    step = ftrain.make_step(loss_fn, MOMENTUM)
    state = ftrain.TrainState.create(init_params(), MOMENTUM)
    run = ftrain.Run(step, state, pipeline, directory=tmp_path, hooks=[saver, QUIET])
    kinds = [type(hook) for hook in run.hooks]
    assert kinds == [
        StopOnNaN,
        StepCounter,
        CrashBundle,
        DataFingerprint,
        Logging,
        SummarySaver,
        CheckpointSaver,
    ]
    assert run.hooks[-1] is saver


@pytest.mark.standard_promotion  # optax.adam
def test_plain_iterables_and_stock_optax_work(pipeline):
    batches = (pipeline.batch(step) for step in range(25))
    state = ftrain.train(
        loss_fn, init_params(), batches, optimizer=optax.adamw(0.01), hooks=[QUIET]
    )
    assert int(state.step) == 25


@pytest.mark.parametrize(
    "optimizer", [optax.lbfgs(), optax.polyak_sgd()], ids=["lbfgs", "polyak_sgd"]
)
def test_optimizers_that_look_at_the_loss_work(optimizer):
    whole = ftrain.data.Pipeline(ftrain.data.ArraySource(make_arrays()), batch_size=64)
    state = ftrain.train(
        loss_fn, init_params(), whole, optimizer=optimizer, steps=20, hooks=[QUIET]
    )
    np.testing.assert_allclose(state.params["w"], WEIGHTS, atol=1e-4)


def test_an_evaluation_that_fails_at_the_end_does_not_cost_the_checkpoint(pipeline, tmp_path):
    def evaluate(params):
        raise RuntimeError("evaluation failed")

    hooks = [QUIET, Evaluator(evaluate)]
    with pytest.raises(RuntimeError, match="evaluation failed"):
        ftrain.train(
            loss_fn,
            init_params(),
            pipeline,
            optimizer=MOMENTUM,
            steps=30,
            directory=tmp_path,
            hooks=hooks,
        )
    assert CheckpointManager(tmp_path / "checkpoints").steps() == [30]


def test_ctrl_c_saves_before_it_raises(pipeline, tmp_path):
    class Interrupt(ftrain.Hook):
        when = ftrain.training.at(20)

        def after_step(self, report):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        ftrain.train(
            loss_fn,
            init_params(),
            pipeline,
            optimizer=MOMENTUM,
            directory=tmp_path,
            hooks=[QUIET, Interrupt()],
        )
    assert CheckpointManager(tmp_path / "checkpoints").latest() >= 20


@pytest.mark.parametrize("steps", [0, 2.5])
def test_steps_must_be_a_whole_number(pipeline, steps):
    with pytest.raises(ValueError, match=f"must be a whole number >= 1, got {steps}"):
        ftrain.train(loss_fn, init_params(), pipeline, optimizer=MOMENTUM, steps=steps)


def test_a_run_that_would_never_end_is_refused():
    pipeline = ftrain.data.Pipeline(ftrain.data.ArraySource(make_arrays()), batch_size=8)
    optimizer = ftrain.optimizers.gradient_descent(0.1)
    with pytest.raises(ValueError, match=r"would never end: pass steps=\.\.\., epochs="):
        ftrain.train(loss_fn, init_params(), pipeline, optimizer=optimizer)
