"""`[precision]` and `remat` in a config."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tomli_w
from command import run
from regression import WEIGHTS

from ftrain.config import ConfigError, build, load, plan
from ftrain.gradients.loss_scaling import LossScaleState

CONFIG = """
task = "regression:regression"
steps = 20

[data]
batch_size = 8

[optimizer]
name = "momentum"
momentum = 0.9
learning_rate = 0.01

[precision]
compute = "bfloat16"
"""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def traced(path, *overrides):
    job = build(plan(load(path, overrides)))
    return job, *job.trace()


def message_of(path, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        traced(path, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.standard_promotion  # the task adds float32 noise to its batch
def test_the_table_is_the_policy_of_the_run(config):
    job, state, _ = traced(config, "precision.params=bfloat16", "precision.slots=float32")
    assert job.step.precision == job.precision
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}
    resolved = job.plan.resolved()
    assert resolved["precision"] == {
        "compute": "bfloat16",
        "params": "bfloat16",
        "output": "float32",
        "slots": "float32",
        "keep": [],
    }
    assert "loss_scaling" not in resolved
    assert "precision" not in plan(load(config, ["precision.compute=float32"])).resolved()["step"]


@pytest.mark.standard_promotion
def test_float16_switches_loss_scaling_on_and_says_so(config):
    job, state, metrics = traced(config, "precision.compute=float16", "guard={}")
    assert isinstance(state.opt_state, LossScaleState)
    assert not isinstance(state.opt_state.inner, LossScaleState)
    assert "loss_scale" in metrics
    resolved = job.plan.resolved()
    assert resolved["loss_scaling"]["scale"] == 2.0**15
    again = config.with_name("again.toml")
    again.write_text(tomli_w.dumps(resolved))
    assert plan(load(again)).resolved() == resolved
    own, _, _ = traced(config, "precision.compute=float16", "loss_scaling.scale=4.0")
    assert own.plan.resolved()["loss_scaling"]["scale"] == 4.0
    assert float(own.initial_state().opt_state.loss_scale) == 4.0


@pytest.mark.standard_promotion
def test_an_optimizer_that_scales_the_loss_is_not_scaled_twice(config):
    optimizer = 'optimizer={name="loss_scaling", scale=8.0, optimizer={name="adam"}}'
    job, state, _ = traced(config, "precision.compute=float16", optimizer)
    assert "loss_scaling" not in job.plan.resolved()
    assert float(job.initial_state().opt_state.loss_scale) == 8.0
    assert not isinstance(state.opt_state.inner, LossScaleState)


def test_a_prediction_is_measured_in_the_dtype_of_the_policy(config):
    found = {}
    for compute in ("float32", "bfloat16"):
        overrides = ['task="regression:measured"', f"precision.compute={compute}"]
        job, _, _ = traced(config, *overrides)
        state = job.initial_state()
        state = state.replace(params={"w": jnp.asarray(WEIGHTS) * 1.01, "b": jnp.full((), 0.2525)})
        found[compute] = job.evaluator.measure(state)["eval/r2"]
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=1e-2)
    assert found["bfloat16"] != pytest.approx(found["float32"], rel=1e-6)


def test_remat_is_a_key_of_the_step(config):
    job = build(plan(load(config, ["step.remat=layers"])))
    assert job.step.remat == "layers"
    assert plan(load(config)).resolved()["step"]["remat"] == "none"


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["precision.compute=int8"],
            "[precision] compute must be one of bfloat16, float16, float32",
        ),
        (["precision.compute=bfloat61"], "[precision] compute must be one of bfloat16, float16"),
        (["precision.comput=float16"], "precision.comput: unknown key; did you mean compute?"),
        (["precision={}"], "precision.compute: is missing"),
        (["precision=bfloat16"], "precision: must be a table, [precision], got 'bfloat16'"),
        (["precision.params=float64"], "[precision] params is float64, which JAX only has with"),
        (["precision.keep=['label']"], "precision: keep: pattern 'label' matches no leaf"),
        (
            [
                "precision.params=bfloat16",
                "optimizer.rounding=nearest",
                "optimizer.learning_rate=1e-4",
            ],
            "precision: params in bfloat16 cannot hold a learning rate of 0.0001",
        ),
        (["step.remat=everything"], "step.remat: "),
    ],
)
def test_mistakes_are_one_line(config, overrides, expected):
    assert expected in message_of(config, *overrides)


def test_a_run_in_half_precision_is_trained_and_resumed(config, tmp_path):
    overrides = ["precision.compute=float16", f"run.directory={tmp_path / 'run'}"]
    done = run("train", config, *overrides, "steps=5")
    assert done.returncode == 0, done.stderr
    assert "loss_scale" in done.stdout
    more = run("train", config, *overrides, "steps=8", "--accept-changes")
    assert more.returncode == 0, more.stderr
    assert "done: 3 steps" in more.stdout
    shown = run("check", config, *overrides)
    # The task adds float32 noise to its batch, so that JAX promotes: `check` tells.
    assert re.search(r"precision +compute float16, .*matrix products: \d in float32", shown.stdout)
    refused = run("check", config, "precision.compute=int8")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") <= 2
