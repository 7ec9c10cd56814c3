"""What an evaluator passes on: the model state to the function, and arrays to the log."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_hooks import drive

import ftrain
from ftrain import TrainState, every, make_step
from ftrain.checkpoints import CheckpointManager
from ftrain.hooks import Evaluator, Logging, StopAtStep
from ftrain.summaries import read_metrics
from ftrain.training import Loop, at

SGD = optax.sgd(0.1)


def loss_fn(params, batch, rng, model_state):
    return jnp.mean(batch["y"]) * params["b"], {}, {"seen": model_state["seen"] + 1}


def stateful() -> TrainState:
    params = {"b": jnp.ones(())}
    return TrainState.create(params, SGD, averages=True, model_state={"seen": jnp.zeros(())})


def evaluate(params, model_state):
    return {"seen": model_state["seen"]}


def test_an_evaluator_gets_the_model_state(pipeline):
    lines = []
    hooks = [
        Evaluator(evaluate, when=every(steps=3)),
        Logging(["eval/seen"], when=every(steps=3), write=lines.append),
        StopAtStep(6),
    ]
    with Loop(make_step(loss_fn, SGD, averages=0.9), stateful(), pipeline, hooks=hooks) as loop:
        while not loop.should_stop():
            loop.advance()
    lines = [line for line in lines if line.startswith("step")]
    assert lines == ["step 3: eval/seen 3", "step 6: eval/seen 6"]


def test_checkpoints_are_evaluated_with_their_model_state(tmp_path):
    state = stateful()
    CheckpointManager(tmp_path).save(4, state.replace(model_state={"seen": jnp.ones(()) * 4}))
    for use_averages in (False, True):
        found = ftrain.evaluate_checkpoints(
            tmp_path, evaluate, state, use_averages=use_averages, timeout=0.05
        )
        assert list(found) == [(4, {"eval/seen": 4.0})]


def test_the_form_of_the_function_must_fit():
    with pytest.raises(TypeError, match=r"evaluate is called as evaluate\(params, model_state\)"):
        Evaluator(lambda params: {}).measure(stateful())
    plain = TrainState.create({"b": jnp.ones(())}, SGD)
    with pytest.raises(TypeError, match="because there is no model state"):
        Evaluator(evaluate).measure(plain)


def test_small_arrays_are_published_by_index_and_large_ones_are_not(pipeline, tmp_path):
    def arrays(params):
        return {
            "loss": np.float32(0.5),
            "f1": np.array([0.25, 1.0]),
            "matrix": jnp.eye(3),
            "confusion": np.eye(10),
            "one": np.array([3.0]),
        }

    lines = []
    log = Logging(when=at(1), write=lines.append)
    drive([Evaluator(arrays, when=every(steps=2)), log, StopAtStep(4)], pipeline)
    notices = [line for line in lines if line.startswith("eval/")]
    assert notices == [
        "eval/confusion is not published: it has 100 values, of arrays only up to 16 are"
    ]
    shown = next(line for line in lines if line.startswith("step 2: "))
    assert "eval/loss 0.5, eval/f1/0 0.25, eval/f1/1 1, eval/matrix/0/0 1, " in shown
    assert "eval/one 3" in shown
    assert "confusion" not in shown
    CheckpointManager(tmp_path).save(1, TrainState.create({"b": jnp.ones(())}, SGD))
    like = TrainState.create({"b": jnp.ones(())}, SGD)
    options = {"timeout": 0.05, "write_to": tmp_path / "eval"}
    ((_, found),) = ftrain.evaluate_checkpoints(tmp_path, arrays, like, **options)
    assert found["eval/f1/1"] == 1.0
    assert "eval/confusion" not in found
    (line,) = read_metrics(tmp_path / "eval" / "metrics.jsonl")
    assert line["eval/f1/0"] == 0.25
