"""The shipped tasks reach the same quality under each precision policy."""

import re

import jax
import jax.numpy as jnp
import pytest
from command import ROOT, run

from ftrain import Precision, TrainState, evaluate, make_step, optimizers
from ftrain.data import Pipeline
from ftrain.hooks import Logging
from ftrain.run import train
from ftrain.tasks import digits, source_lm
from ftrain.training.precision import as_precision, count_products

SMALL_LM = {"width": 16, "layers": 1, "context": 16, "evaluation_windows": 16, "sample_bytes": 0}
POLICIES = {
    "bfloat16": ["precision.compute=bfloat16"],
    "float16": ["precision.compute=float16"],
    "bfloat16 params": ["precision.compute=bfloat16", "precision.params=bfloat16"],
    "bfloat16 slots": ["precision.compute=bfloat16", "precision.slots=bfloat16"],
}


def learn(task, steps, batch_size, learning_rate, precision):
    state = train(
        task.loss_fn,
        task.init(jax.random.key(0)),
        Pipeline(task.source, batch_size=batch_size),
        optimizer=optimizers.adam(learning_rate),
        steps=steps,
        precision=precision,
        fuse=1,  # a trial would compile more
        hooks=[Logging(write=lambda line: None)],
    )
    if task.evaluate is not None:
        return task.evaluate(state.params)
    policy = as_precision(precision)
    predict = task.predict if policy is None else policy.apply(task.predict)
    held_out = Pipeline(task.evaluation_source, batch_size=100, epochs=1, last="pad")
    return evaluate(predict, state, held_out, task.metrics)


def test_small_digits_learn_as_in_float32():
    task = digits(channels=2, hidden=16, dropout=0.1)
    losses = [learn(task, 40, 32, 0.01, policy)["loss"] for policy in (None, "bfloat16", "float16")]
    assert losses[0] < 1.5
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.05)


def test_a_small_language_model_learns_as_in_float32():
    task = source_lm(**SMALL_LM)
    policies = (None, Precision("bfloat16", params="bfloat16", slots="bfloat16"))
    bits = [learn(task, 25, 8, 0.02, policy)["bits_per_byte"] for policy in policies]
    assert bits[0] < 6
    assert bits[1] == pytest.approx(bits[0], rel=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("make", [digits, lambda: source_lm(**SMALL_LM)], ids=["digits", "lm"])
def test_every_product_of_a_task_follows_the_policy(make, dtype):
    task = make()
    optimizer = optimizers.adam(0.01)
    state = jax.eval_shape(
        lambda: TrainState.create(task.init(jax.random.key(0)), optimizer, precision=dtype)
    )
    batch = {name: jnp.asarray(array) for name, array in task.source.read([0, 1]).items()}
    step = make_step(task.loss_fn, optimizer, precision=dtype)
    assert set(count_products(jax.make_jaxpr(step)(state, batch).jaxpr)) == {dtype}


@pytest.mark.campaign
@pytest.mark.parametrize("policy", POLICIES)
def test_digits_reach_their_accuracy(policy, tmp_path):
    config = ROOT / "configs" / "digits.toml"
    done = run("train", config, f"run.directory={tmp_path}", *POLICIES[policy])
    assert done.returncode == 0, done.stderr
    assert last(done.stdout, "eval/accuracy") > 0.98


def train_language_model(directory, *overrides) -> float:
    """The bits per byte of a small model; ftrain's adam keeps small updates."""
    done = run(
        "train",
        ROOT / "configs" / "source_lm.toml",
        f"run.directory={directory}",
        *("steps=400", "model.width=64", "model.layers=2", "data.batch_size=8"),
        *("model.sample_bytes=0", 'evaluation.every_steps="100%"'),
        'optimizer={name="adam", learning_rate={name="cosine_decay", learning_rate=0.003, '
        'decay_steps="100%"}}',
        *overrides,
    )
    assert done.returncode == 0, done.stderr
    return last(done.stdout, "eval/bits_per_byte")


@pytest.fixture(scope="module")
def float32_bits(tmp_path_factory) -> float:
    return train_language_model(tmp_path_factory.mktemp("float32") / "run")


@pytest.mark.campaign
@pytest.mark.parametrize("policy", POLICIES)
def test_a_language_model_reaches_the_bits_of_float32(policy, float32_bits, tmp_path):
    bits = train_language_model(tmp_path, *POLICIES[policy])
    assert float32_bits < 3
    assert bits == pytest.approx(float32_bits, rel=0.01)


def last(output: str, metric: str) -> float:
    return float(re.findall(rf"{metric} ([\d.]+)", output)[-1])
