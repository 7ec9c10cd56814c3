"""Runs that start from a checkpoint: new ones only, bit-identical when resumed, on record."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import ftrain
from ftrain.checkpoints import CheckpointError, WarmStart, digest_leaves
from ftrain.training import Scaffold
from ftrain.training.record import RunMismatchError, set_aside

DATA = ftrain.data.ArraySource({"x": np.arange(16, dtype=np.float32).reshape(8, 2) / 8})
PARAMS = {"dense": {"w": jnp.float32([1.0, -1.0])}}


def loss(params, batch, rng):
    return jnp.mean(jnp.square(batch["x"] @ params["dense"]["w"] - 1))


def train(steps, directory=None, params=PARAMS, optimizer=None, **options):
    return ftrain.train(
        loss,
        params,
        ftrain.data.Pipeline(DATA, batch_size=4),
        optimizer=optimizer or ftrain.optimizers.adam(0.1),
        steps=steps,
        directory=directory,
        **options,
    )


@pytest.fixture
def file(tmp_path) -> Path:
    save_file({"dense/w": np.float32([3.0, 2.0])}, tmp_path / "old.safetensors")
    return tmp_path / "old.safetensors"


def test_a_new_run_starts_from_the_checkpoint_and_says_so(tmp_path, file):
    expected = train(3, params={"dense": {"w": jnp.float32([3.0, 2.0])}})
    found = train(3, tmp_path / "run", warm_start=file)
    assert digest_leaves(found) == digest_leaves(expected)
    record = json.loads((tmp_path / "run" / "warm_start.json").read_text())
    assert record["checkpoint"] == str(file)
    assert record["taken"] == {"params/dense/w": "dense/w"}
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["warm_start"] == {"checkpoint": str(file)}
    set_aside(tmp_path / "run")
    assert not (tmp_path / "run" / "warm_start.json").exists()


def test_a_resumed_run_is_not_started_again(tmp_path, file):
    whole = train(6, tmp_path / "whole", warm_start=WarmStart(file))
    train(3, tmp_path / "run", warm_start=file)
    file.unlink()
    resumed = train(6, tmp_path / "run", warm_start=file)
    assert digest_leaves(resumed) == digest_leaves(whole)
    with pytest.raises(RunMismatchError, match=r"warm_start was \{'checkpoint': .*other"):
        train(7, tmp_path / "run", warm_start="other.npz")
    train(7, tmp_path / "run")  # without one, as it has no effect any more


def test_what_depends_on_the_parameters_is_made_from_the_new_ones(tmp_path, file):
    optimizer = optax.contrib.schedule_free_sgd(0.1)  # its state has a copy of the parameters
    expected = train(3, params={"dense": {"w": jnp.float32([3.0, 2.0])}}, optimizer=optimizer)
    found = train(3, optimizer=optimizer, warm_start=file)
    assert digest_leaves(found) == digest_leaves(expected)
    averaged = train(2, averages=0.5, warm_start=file)
    other = train(2, averages=0.5, params={"dense": {"w": jnp.float32([3.0, 2.0])}})
    assert digest_leaves(averaged) == digest_leaves(other)


def test_a_run_goes_on_from_another_with_everything(tmp_path):
    whole = train(6)
    train(3, tmp_path / "first")
    second = train(6, tmp_path / "second", warm_start=WarmStart(tmp_path / "first", include=".*"))
    assert digest_leaves(second) == digest_leaves(whole)
    shutil.rmtree(tmp_path / "first")
    assert int(train(7, tmp_path / "second").step) == 7


def test_it_is_a_scaffold_too(tmp_path, file):
    called = []

    def init_fn(state):
        called.append(state.params["dense"]["w"].tolist())
        return state

    train(1, warm_start=file, scaffold=Scaffold(init_fn=init_fn))
    assert called == [[3.0, 2.0]]
    step = ftrain.make_step(loss, ftrain.optimizers.adam(0.1))
    state = ftrain.TrainState.create(PARAMS, ftrain.optimizers.adam(0.1))
    data = ftrain.data.Pipeline(DATA, batch_size=4)
    with ftrain.Run(step, state, data, scaffold=Scaffold(init_fn=WarmStart(file))) as run:
        assert run.state.params["dense"]["w"].tolist() == [3.0, 2.0]
        run.request_stop()


def test_model_state_is_taken_too(tmp_path):
    save_file(
        {"dense/w": np.float32([3.0, 2.0]), "model_state/mean": np.float32([5.0])},
        tmp_path / "old.safetensors",
    )

    def stateful(params, batch, rng, model_state):
        return loss(params, batch, rng), {}, {"mean": model_state["mean"] + 1}

    state = ftrain.train(
        stateful,
        PARAMS,
        ftrain.data.Pipeline(DATA, batch_size=4),
        optimizer=optax.sgd(0.1),
        steps=2,
        model_state={"mean": jnp.zeros(1)},
        warm_start=tmp_path / "old.safetensors",
    )
    assert state.model_state["mean"].tolist() == [7.0]


def test_a_mistake_is_found_before_a_step_is_taken(tmp_path, file):
    with pytest.raises(CheckpointError, match="leaf params/other is missing, nearest are dense/w"):
        train(3, tmp_path / "run", params={"other": jnp.zeros(2)}, warm_start=file)
    assert not (tmp_path / "run" / "warm_start.json").exists()


def test_the_state_is_placed_on_the_mesh(tmp_path, file):
    mesh = ftrain.cluster.make_mesh(data=jax.device_count())
    if 4 % mesh.size:
        pytest.skip("the batch has 4 examples")
    found = train(2, warm_start=file, mesh=mesh)
    assert found.params["dense"]["w"].sharding.device_set == set(mesh.devices.flat)
