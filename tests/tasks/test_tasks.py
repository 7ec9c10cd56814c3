from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import run

import ftrain
from ftrain import evaluate, metrics, optimizers
from ftrain.data import Pipeline
from ftrain.hooks import Logging
from ftrain.run import train
from ftrain.tasks import Task, digits, source_lm
from ftrain.tasks.digits import load_digits
from ftrain.tasks.source_lm import init_transformer, load_source, transformer_logits

SMALL_LM = {"width": 32, "layers": 1, "context": 32, "evaluation_windows": 40, "sample_bytes": 20}


def learn(task, steps, batch_size, learning_rate):
    params = task.init(jax.random.key(0))
    pipeline = Pipeline(task.source, batch_size=batch_size)
    optimizer = optimizers.adam(learning_rate)
    state = train(
        task.loss_fn,
        params,
        pipeline,
        optimizer=optimizer,
        steps=steps,
        hooks=[Logging(write=lambda line: None)],
    )
    return measure(task, params), measure(task, state.params)


def measure(task, params):
    if task.evaluate is not None:
        return task.evaluate(params)
    data = Pipeline(task.evaluation_source, batch_size=100, epochs=1, last="pad")
    return evaluate(task.predict, params, data, task.metrics)


def test_digits_are_split_into_disjoint_sets():
    train, test = load_digits()
    assert len(train["label"]) + len(test["label"]) == 1797
    assert len(test["label"]) == 360
    assert set(np.unique(test["label"])) == set(range(10))
    assert train["image"].shape[1:] == (8, 8, 1)
    assert train["image"].max() == 1.0
    training = {image.tobytes() for image in train["image"]}
    assert not any(image.tobytes() in training for image in test["image"])


def test_digits_learn():
    before, after = learn(digits(channels=8, hidden=32, dropout=0.1), 150, 64, 0.003)
    assert before["accuracy"] < 0.4
    assert after["accuracy"] > 0.9
    assert after["loss"] < before["loss"]


def test_digits_are_measured_on_all_held_out_images():
    task = digits(channels=4, hidden=16)
    params = task.init(jax.random.key(0))
    _, test = load_digits()
    outputs = task.predict(params, test)
    found = measure(task, params)
    right = np.argmax(np.asarray(outputs["logits"]), axis=-1) == test["label"]
    assert found["accuracy"] == pytest.approx(right.mean(), abs=1e-12)
    logits = np.asarray(outputs["logits"], np.float64)
    chosen = np.take_along_axis(logits, test["label"][:, None], axis=-1)[:, 0]
    losses = np.log(np.exp(logits).sum(axis=-1)) - chosen
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"evaluation_source": [1]}, "needs predict"),
        ({"metrics": {"x": metrics.mean()}}, "needs an evaluation_source"),
        ({"evaluation_source": [1], "predict": dict, "evaluate": dict}, "not both"),
        ({"evaluation_source": [1], "predict": dict, "metrics": {"x": 1}}, "metric x must be"),
    ],
)
def test_what_a_task_is_evaluated_with_fits_together(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Task(dict, dict, [1], **fields)


def test_dropout_draws_from_the_steps_rng():
    task = digits(channels=4, hidden=32, dropout=0.5)
    params = task.init(jax.random.key(0))
    batch = task.source.read(np.arange(8))
    losses = [float(task.loss_fn(params, batch, jax.random.key(seed))[0]) for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_source_files_are_held_out_by_name():
    train, test = load_source()
    assert 0.01 < len(test) / (len(train) + len(test)) < 0.2
    assert train.dtype == test.dtype == np.uint8


@pytest.mark.campaign
def test_source_lm_learns_and_writes():
    before, after = learn(source_lm(**SMALL_LM), 120, 16, 0.01)
    assert 7 < before["bits_per_byte"] < 10
    assert after["bits_per_byte"] < 5.5
    assert after["sample"].startswith("def ")
    assert "sample" not in source_lm(**SMALL_LM | {"sample_bytes": 0}).evaluate(
        init_transformer(jax.random.key(0), vocabulary=256, width=32, layers=1)
    )


def test_the_transformer_sees_no_future():
    params = init_transformer(jax.random.key(0), vocabulary=256, width=32, layers=2)
    tokens = jnp.arange(24).reshape(2, 12)
    changed = tokens.at[:, 7:].set(99)
    logits, others = (transformer_logits(params, t, heads=2) for t in (tokens, changed))
    np.testing.assert_allclose(logits[:, :7], others[:, :7], atol=1e-5)
    assert not np.allclose(logits[:, 7:], others[:, 7:], atol=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: digits(channels=0), "channels must be >= 1, got 0"),
        (lambda: digits(dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
        (
            lambda: source_lm(width=30, heads=4),
            "width must be a multiple of 2 \\* heads = 8, got 30",
        ),
        (lambda: source_lm(layers=0), "layers must be >= 1, got 0"),
        (lambda: source_lm(heads=0), "heads must be >= 1, got 0"),
        (lambda: source_lm(sample_bytes=-9), "sample_bytes must be >= 0, got -9"),
    ],
)
def test_sizes_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_trained_digits_are_loaded_for_images_without_labels(tmp_path):
    config = Path(__file__).parents[2] / "configs" / "digits.toml"
    shrunk = ["steps=2", "model.channels=2", f"run.directory={tmp_path}"]
    assert run("train", config, *shrunk, cwd=tmp_path).returncode == 0
    images = load_digits()[1]["image"][:3]
    outputs = ftrain.load(tmp_path).apply({"image": images})
    assert outputs["logits"].shape == (3, 10)
    assert "loss" not in outputs


def test_the_language_model_predicts_the_next_bytes():
    task = source_lm(**SMALL_LM)
    assert task.predict is not None
    tokens = np.frombuffer(b"import os", np.uint8)[None]
    logits = task.predict(task.init(jax.random.key(0)), {"tokens": tokens})["logits"]
    assert logits.shape[:2] == (1, 9)
