"""[warm_start] and [checkpoint] restore_best: what a config builds."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from ftrain.checkpoints import CheckpointError, VocabInfo, digest_leaves
from ftrain.config import ConfigError, build, load, plan

CONFIG = """
task = "regression:regression"
steps = 4

[data]
batch_size = 8

[optimizer]
name = "adam"

[step]
averages = 0.9

[warm_start]
checkpoint = "{path}"
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "old.safetensors"
    save_file({"w": np.float32([3, 2, 1]), "b": np.array(0.5, np.float32)}, path)
    (tmp_path / "job.toml").write_text(CONFIG.format(path=path))
    return tmp_path / "job.toml"


def start(config, *overrides):
    job = build(plan(load(config, overrides)))
    scaffold = job.options()["scaffold"]
    assert scaffold is not None
    assert scaffold.init_fn is not None
    return job, scaffold.init_fn(job.initial_state())


def test_every_device_gets_its_part_of_the_new_state(config, tmp_path):
    _, whole = start(config, "mesh.data=1")
    np.testing.assert_array_equal(whole.params["w"], [3, 2, 1])
    np.testing.assert_array_equal(whole.averages["w"], [3, 2, 1])
    devices = jax.device_count()
    job, spread = start(config, f"mesh.data={devices}")
    assert digest_leaves(spread) == digest_leaves(whole)
    leaves, expected = jax.tree.leaves(spread), jax.tree.leaves(job.shardings())
    assert [leaf.sharding for leaf in leaves] == expected


def test_the_random_numbers_are_those_of_the_seed(config):
    job, started = start(config, "mesh.data=1")
    assert digest_leaves(started.rng) == digest_leaves(job.initial_state().rng)


def test_parameters_of_another_precision_need_a_cast(config):
    _, state = start(config, "mesh.data=1", "precision.compute=bfloat16")
    assert state.params["w"].dtype == "float32"
    narrow = ["mesh.data=1", "precision.compute=bfloat16", "precision.params=bfloat16"]
    with pytest.raises(CheckpointError, match=r"leaf params/w \(there w\) is float32, expected b"):
        start(config, *narrow)
    _, state = start(config, *narrow, "warm_start.cast=true")
    assert state.params["w"].dtype == "bfloat16"
    np.testing.assert_array_equal(np.float32(state.params["w"]), [3, 2, 1])


def test_all_keys_can_be_set(config, tmp_path):
    table = """
include = ["params/.*"]
exclude = "params/b"
rename = { "^x" = "y" }
cast = true
use_averages = true
betas = [0.9, 0.98]

[warm_start.vocabularies."params/w"]
new_vocab = ["a"]
new_vocab_size = 1
num_oov_buckets = 2
old_vocab = "o.txt"
"""
    config.write_text(config.read_text() + table)
    warm_start = build(plan(load(config))).warm_start
    assert warm_start is not None
    assert warm_start.vocabularies == {"params/w": VocabInfo(["a"], 1, 2, "o.txt")}
    assert tuple(warm_start.betas) == (0.9, 0.98)
    assert (warm_start.cast, warm_start.use_averages, warm_start.exclude) == (
        True,
        True,
        "params/b",
    )
    resolved = plan(load(config)).resolved()["warm_start"]
    assert resolved["rename"] == {"^x": "y"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("warm_start.betas=[0.9]", "warm_start.betas"),
        ("warm_start.betas=[0.9, 1.5]", r"\[warm_start\] betas must be two numbers"),
        ("warm_start.rename=x", "warm_start.rename: must be a table"),
        ("checkpoint.restore_best=true", r"\[checkpoint\] restore_best needs keep_best"),
    ],
)
def test_mistakes_name_the_key(config, override, message):
    with pytest.raises(ConfigError, match=message):
        build(plan(load(config, [override])))


def test_without_the_table_there_is_no_warm_start(config):
    config.write_text(config.read_text().split("[warm_start]")[0])
    job = build(plan(load(config)))
    assert job.warm_start is None
    assert "warm_start" not in job.plan.resolved()
    assert "scaffold" not in job.options()
