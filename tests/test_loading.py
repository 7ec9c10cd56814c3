"""ftrain.load: a trained model out of the directory of its run."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command import run, write_config

import ftrain
from ftrain.checkpoints import CheckpointError, CheckpointManager
from ftrain.config import ConfigError
from ftrain.hooks import CheckpointSaver


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run of a config with two checkpoints; by its metric the first is the best."""
    home = tmp_path_factory.mktemp("loading")
    config = write_config(home, steps=4, every=2)
    table = 'keep_best = 1\nbest_metric = "loss"\nbest_mode = "max"\nrestore_best = true\n'
    text = config.read_text().replace("[checkpoint]\n", f"[checkpoint]\n{table}")
    config.write_text(text + "\n[step]\naverages = 0.5\n")
    done = run("train", config, "run.directory=run", cwd=home)
    assert done.returncode == 0, done.stderr
    return home / "run"


def test_a_model_is_loaded_and_applied_in_three_lines(home):
    model = ftrain.load(home, step="latest")
    outputs = model.apply({"x": np.eye(3, dtype=np.float32)})
    np.testing.assert_allclose(outputs["y"], model.params["w"] + model.params["b"], rtol=1e-6)
    assert model.step == 4
    assert model.model_state is None
    assert model.config is not None
    assert model.config["optimizer"]["name"] == "adam"
    assert model.task is not None
    assert len(model.task.source) == 64
    assert repr(model) == f"<model of {home}, step 4: 2 leaves of parameters, with its task>"


def test_the_step_is_a_number_a_name_or_the_result_of_the_run(home):
    assert ftrain.load(home, 2).step == ftrain.load(home, "best").step == 2
    assert ftrain.load(home).step == 2  # because of restore_best
    assert ftrain.load(str(home), step="latest").step == 4
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint of step 3; there are \[2, 4\]"
    ):
        ftrain.load(home, 3)


def test_the_path_of_a_checkpoint_names_its_run_and_its_step(home, tmp_path):
    assert ftrain.load(home / "best").step == 2
    assert ftrain.load(home / "latest").step == ftrain.load(home / "4").step == 4
    with pytest.raises(ConfigError, match=r"none does not exist, expected the directory of a run"):
        ftrain.load(tmp_path / "none")
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"w.safetensors is a file, .*open_reader"):
        ftrain.load(weights)


def test_averages_may_take_the_place_of_the_parameters(home):
    plain = ftrain.load(home, 4)
    averaged = ftrain.load(home, 4, use_averages=True)
    np.testing.assert_array_equal(averaged.params["w"], plain.averages["w"])
    assert not np.array_equal(averaged.params["w"], plain.params["w"])


def test_a_model_of_a_task_is_applied_without_a_predict(tmp_path):
    config = write_config(tmp_path, steps=3, every=3)
    config.write_text(config.read_text().replace("[model]\nnoise = 0.1\n", ""))
    overrides = ["task=regression:with_model", "run.directory=a", "evaluation={}"]
    done = run("train", config, *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = ftrain.load(tmp_path / "a")
    assert model.model_state["calls"] == 3
    outputs = model.apply(np.eye(3, dtype=np.float32))
    np.testing.assert_allclose(outputs, model.params["w"] + model.params["b"], rtol=1e-6)
    overrides = ["task=regression:with_model", "run.directory=b", "warm_start.checkpoint=a"]
    done = run("train", config, *overrides, "evaluation={}", cwd=tmp_path)
    assert "warm start: 3 leaves from" in done.stdout
    assert ftrain.load(tmp_path / "b").model_state["calls"] == 6


def train(home, **options):
    def loss(params, batch, rng, model_state):
        return jnp.mean(batch["x"] * params["layers"][0]["w"]), {}, {"n": model_state["n"] + 1}

    data = ftrain.data.ArraySource({"x": np.ones((4, 2), np.float32)})
    return ftrain.train(
        loss,
        {"layers": [{"w": jnp.ones(2)}]},
        ftrain.data.Pipeline(data, batch_size=4),
        optimizer=optax.sgd(0.5),
        steps=3,
        directory=home,
        model_state={"n": jnp.zeros(())},
        **options,
    )


def test_a_run_without_a_config_is_loaded_by_name(tmp_path):
    saver = CheckpointSaver(tmp_path / "checkpoints", when=ftrain.every(steps=1), keep_best=1)
    state = train(tmp_path, hooks=[saver], averages=0.5, averages_of="layers/.*")
    model = ftrain.load(tmp_path)
    np.testing.assert_array_equal(model.params["layers"]["0"]["w"], state.params["layers"][0]["w"])
    assert model.model_state["n"] == 3
    assert (model.step, model.config, model.task) == (3, None, None)
    assert "by name: the run has no config.toml" in repr(model)
    with pytest.raises(ConfigError, match=r"has no config.toml, which would name its task; call y"):
        model.apply({})
    assert ftrain.load(tmp_path, "best").step == 3
    averages = ftrain.load(tmp_path, use_averages=True).params["layers"]["0"]["w"]
    np.testing.assert_array_equal(averages, state.averages["layers"][0]["w"])


def test_what_cannot_be_loaded_is_a_clear_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="there is no checkpoint yet"):
        ftrain.load(tmp_path / "empty")
    train(tmp_path / "run")
    with pytest.raises(ConfigError, match="has no moving averages; drop use_averages"):
        ftrain.load(tmp_path / "run", use_averages=True)
    CheckpointManager(tmp_path / "other").save(1, {"w": np.zeros(1)})
    with pytest.raises(ConfigError, match=r"has no params/..., so it is not of a run"):
        ftrain.load(tmp_path / "other")
