"""One classifier in plain JAX and four libraries, trained from a config: resumed bit for bit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import run

import ftrain
from ftrain.config import build, load, plan
from ftrain.hooks import Logging
from ftrain.tree import named_leaves

pytestmark = pytest.mark.standard_promotion  # the libraries mix dtypes
ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "models" / "digits.toml"
LIBRARIES = ["plain", "nnx", "linen", "equinox", "haiku"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Configs name their tasks from the root, `examples.models....`."""
    monkeypatch.syspath_prepend(ROOT)


def make_job(library, directory, *overrides):
    task = f"task=examples.models.digits_{library}:digits"
    return build(plan(load(CONFIG, [task, f"run.directory={directory}", *overrides])))


def train(library, directory, *overrides):
    """Train a config as `ftrain train` does, in this process."""
    job = make_job(library, directory, *overrides)
    hooks = job.hooks(Logging(write=lambda line: None))
    options = {"directory": directory, "hooks": hooks, "steps": job.steps, **job.loop_options}
    with ftrain.Run(job.step, job.initial(), job.pipeline, **options) as trained:
        while not trained.should_stop():
            trained.advance()
    return trained.state


def values(state):
    return {
        name: np.asarray(
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        for name, leaf in named_leaves(state).items()
    }


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_config_resumes_bit_for_bit(library, tmp_path):
    options = ["checkpoint.every_steps=2", "step.averages=0.9", "data.batch_size=16"]
    one_device = ["mesh.data=1"]
    straight = train(library, tmp_path / "straight", "steps=5", *options, *one_device)
    train(library, tmp_path / "resumed", "steps=3", *options, *one_device)
    resumed = train(library, tmp_path / "resumed", "steps=5", *options, *one_device)
    assert int(resumed.step) == 5
    expected = values(straight)
    first = values(make_job(library, tmp_path / "x", *options, *one_device).initial_state())
    assert any(name.startswith("model_state/") for name in expected)
    for name, value in values(resumed).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
        if name.startswith(("params/", "model_state/")):
            assert not np.array_equal(value, first[name]), f"{name} was not trained"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("parallel", ["jit", "shard_map"])
def test_a_config_trains_on_a_mesh(library, parallel, tmp_path):
    sharding = [] if parallel == "shard_map" else ["mesh={data=2, fsdp=2}", "sharding.min_size=64"]
    options = ["steps=2", f"step.parallel={parallel}", "data.batch_size=16", *sharding]
    job = make_job(library, tmp_path / "run", *options)
    shapes, _ = job.trace()
    state = train(library, tmp_path / "run", *options)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert len(jax.tree.leaves(state.params)[-1].sharding.device_set) == 4
    assert all(np.isfinite(value).all() for value in values(state.model_state).values())


@pytest.mark.parametrize(
    "library",
    [
        name if name == "nnx" else pytest.param(name, marks=pytest.mark.campaign)
        for name in LIBRARIES
    ],
)
def test_a_config_that_is_killed_resumes_bit_for_bit(library, tmp_path):
    done = run(
        "verify-resume",
        CONFIG,
        f"task=examples.models.digits_{library}:digits",
        "steps=120",
        "checkpoint.every_steps=10",
        "data.batch_size=16",
        "--kills",
        "1",
        "--directory",
        tmp_path / "proof",
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same, bit for bit" in done.stdout
    assert "after 1 kill" in done.stdout


@pytest.mark.parametrize("library", LIBRARIES)
def test_there_are_at_most_15_lines_of_glue(library):
    """What is not the network itself, imports and the program around it."""
    source = (CONFIG.parent / f"digits_{library}.py").read_text()
    glue = source[source.index("train, test = load_digits()") : source.index("if __name__")]
    assert sum(bool(line.strip()) for line in glue.splitlines()) <= 15


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_config_is_evaluated_with_the_model_state(library, tmp_path):
    """On one device and on four; the statistics of the batches seen so far are used."""
    job = make_job(library, tmp_path / "run", "evaluation.batch_size=100", "mesh.data=1")
    state = job.initial_state()
    found = job.evaluator.measure(state)
    spread = make_job(library, tmp_path / "run", "evaluation.batch_size=100")
    same = spread.evaluator.measure(spread.initial_state())
    assert found["eval/accuracy"] == same["eval/accuracy"]
    assert found["eval/f1"] == pytest.approx(same["eval/f1"])
    moved = jax.tree.map(
        lambda leaf: leaf + 3 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
        state.model_state,
    )
    assert job.evaluator.measure(state.replace(model_state=moved)) != found
