"""Model state goes wherever the parameters go: replicas, microbatches, skips, averages, replay."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import run
from normalized import MODEL, exploding_loss, loss_fn
from regression import make_arrays

import ftrain
from ftrain import TrainState, compile_step, make_step
from ftrain.checkpoints import CheckpointManager, LeafMismatchError
from ftrain.cluster import Sharding, make_mesh
from ftrain.data import ArraySource, Pipeline
from ftrain.gradients import loss_scaling
from ftrain.hooks import NonFiniteError
from ftrain.training import locate, read_crash
from ftrain.training.compiled_step import axis_of

SGD = ftrain.optimizers.gradient_descent(0.05)
BATCH = {name: array[:16] for name, array in make_arrays().items()}


def make_data(**options):
    return Pipeline(ArraySource(make_arrays()), **({"batch_size": 16, "seed": 1} | options))


def statistics_of(parts, start=(0.0, 1.0)):
    """The means over replicas of the statistics of their parts."""
    mean = np.mean([part.mean(0) for part in parts], axis=0)
    var = np.mean([part.var(0) for part in parts], axis=0)
    return 0.5 * start[0] + 0.5 * mean, 0.5 * start[1] + 0.5 * var


@pytest.mark.parametrize(("parallel", "parts"), [("jit", 1), ("shard_map", 4), ("pmap", 4)])
def test_the_statistics_of_replicas_are_averaged(parallel, parts):
    mesh = make_mesh()
    step = make_step(loss_fn, SGD, replicas=axis_of(parallel))
    state = TrainState.create(MODEL, SGD)
    after, _ = compile_step(step, mesh, parallel=parallel)(state, BATCH)
    mean, var = statistics_of(np.split(BATCH["x"], parts))
    np.testing.assert_allclose(after.model_state["mean"], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.model_state["var"], var, rtol=1e-5)
    assert int(after.model_state["count"]) == 1


def test_microbatches_update_the_statistics_one_after_the_other():
    after, _ = make_step(loss_fn, SGD, accumulate=2)(TrainState.create(MODEL, SGD), BATCH)
    first, second = BATCH["x"][::2], BATCH["x"][1::2]
    mean, var = statistics_of([second], statistics_of([first]))
    np.testing.assert_allclose(after.model_state["mean"], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.model_state["var"], var, rtol=1e-5)
    assert int(after.model_state["count"]) == 2


def test_a_step_that_loss_scaling_skips_leaves_the_statistics_alone():
    optimizer = loss_scaling(SGD)
    step = jax.jit(make_step(loss_fn, optimizer))
    state, _ = step(TrainState.create(MODEL, optimizer), BATCH)
    bad = BATCH | {"x": np.full_like(BATCH["x"], np.inf)}
    skipped, metrics = step(state, bad)
    assert int(metrics["update_skipped"]) == 1
    for name, value in state.model_state.items():
        np.testing.assert_array_equal(value, skipped.model_state[name])


def train(directory=None, steps=4, **options):
    return ftrain.train(
        loss_fn,
        MODEL,
        make_data(),
        **({"optimizer": SGD, "steps": steps, "directory": directory} | options),
    )


def same(left, right):
    return jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(*map(_data, (a, b))), left, right))


def _data(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"averages": 0.9},
        {"accumulate": 4},
        {"mesh": "data", "parallel": "shard_map"},
        {"mesh": "fsdp", "sharding": Sharding(min_size=1)},
    ],
    ids=["plain", "averages", "microbatches", "replicas", "sharded"],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, options):
    def with_mesh():
        named = {"data": {}, "fsdp": {"data": 1, "fsdp": -1}}
        given = {"mesh": make_mesh(**named[options["mesh"]])} if "mesh" in options else {}
        return options | given

    straight = train(tmp_path / "straight", 6, **with_mesh())
    train(tmp_path / "resumed", 3, **with_mesh())
    resumed = train(tmp_path / "resumed", 6, **with_mesh())
    assert same(straight, resumed)
    assert int(resumed.model_state["count"]) == 6 * options.get("accumulate", 1)
    if "averages" in options:
        assert resumed.averages.keys() == resumed.params.keys()


def test_a_failed_step_is_taken_again_with_its_model_state(tmp_path):
    with pytest.raises(NonFiniteError, match="at step 5"):
        ftrain.train(
            exploding_loss, MODEL, make_data(), optimizer=SGD, steps=8, directory=tmp_path, fuse=1
        )
    crash = read_crash(tmp_path)
    state = crash.state(like=TrainState.create(MODEL, SGD))
    step = make_step(exploding_loss, SGD)
    while int(state.step) < crash.step - 1:
        state, _ = step(state, make_data().batch(int(state.step)))
    assert int(state.model_state["count"]) == 4
    found = locate(step, state, make_data().batch(crash.step - 1))
    assert found[0].startswith("gradients/w")


def test_model_state_that_is_not_finite_is_named():
    state = TrainState.create(MODEL, SGD)
    state = state.replace(model_state=state.model_state | {"mean": jnp.full(3, jnp.nan)})
    found = locate(make_step(loss_fn, SGD), state, BATCH)
    assert found == ["model_state/mean (3 of 3 values non-finite, the first at [0])"]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (True, r"it has a model_state \(count, mean, var\), and the model of this run has none"),
        (False, r"it has no model_state, and the model of this run has one \(count, mean, var\)"),
    ],
)
def test_a_checkpoint_with_and_one_without_a_model_state(tmp_path, saved, message):
    def go(has_state, **options):
        if has_state:
            return train(tmp_path / "run", **options)
        loss = lambda params, batch, rng: loss_fn(params, batch, rng, MODEL.model_state)[0]  # noqa: E731
        return ftrain.train(
            loss,
            MODEL.params,
            make_data(),
            **({"optimizer": SGD, "directory": tmp_path / "run", "steps": 4} | options),
        )

    go(saved)
    with pytest.raises(ftrain.training.RunMismatchError):
        go(not saved, steps=6)
    with pytest.raises(LeafMismatchError, match=message + r"\nthe run there trains another model"):
        go(not saved, steps=6, accept_changes=True)
    assert int(go(saved, steps=6).step) == 6  # nothing is lost


def test_a_model_state_is_in_the_checkpoint_and_its_own_argument_is_refused(tmp_path):
    state = train(tmp_path)
    manager = CheckpointManager(tmp_path / "checkpoints")
    restored = manager.restore(like=TrainState.create(MODEL, SGD))
    assert same(state, restored)
    with pytest.raises(TypeError, match="a Model has its own model_state"):
        train(model_state={"mean": 0.0})


def test_a_model_in_the_place_of_a_state_is_refused(pipeline):
    step = make_step(loss_fn, SGD)
    with (
        pytest.raises(TypeError, match=r"got a Model; make a state, ftrain.TrainState.create\(mod"),
        ftrain.Run(step, MODEL, pipeline),
    ):
        pass
    with pytest.raises(TypeError, match=r"model_state is a Model.*pass `model.model_state`"):
        TrainState.create(MODEL.params, SGD, model_state=MODEL)


# The same from a config.

CONFIG = """
task = "normalized:{task}"
steps = 8
[data]
batch_size = 16
[optimizer]
name = "gradient_descent"
learning_rate = 0.05
[checkpoint]
every_steps = 3
"""


def command(tmp_path, task, *arguments):
    """Run a command for a config with a task of normalized.py."""
    path = tmp_path / "job.toml"
    path.write_text(CONFIG.format(task=task))
    return run(
        *(each if each != "CONFIG" else path for each in arguments), cwd=__file__.rpartition("/")[0]
    )


def test_replay_of_a_config_takes_the_step_again_with_its_model_state(tmp_path):
    home = tmp_path / "run"
    failed = command(tmp_path, "exploding_task", "train", "CONFIG", f"run.directory={home}")
    assert failed.returncode == 1, failed.stderr
    assert "gradient_norm is nan at step 5" in failed.stderr
    facts = json.loads((home / "crash" / "5" / "crash.json").read_text())
    assert facts["step"] == 5
    replayed = command(tmp_path, "exploding_task", "replay", home)
    assert replayed.returncode == 0, replayed.stderr
    assert "the state before it is computed again from step " in replayed.stdout
    assert "first non-finite: gradients/w" in replayed.stdout


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("raw_module_task", "is a model of flax.nnx (Linear), expected a function of a key, or a"),
        ("method_task", "is a method of a Model: pass the model itself"),
        ("no_function_task", "must be a function of a key that returns parameters, or an ftrain"),
        ("other_form_task", "because the state has no model_state"),
    ],
)
def test_a_task_with_something_else_is_a_mistake_of_the_user(tmp_path, task, message):
    done = command(tmp_path, task, "check", "CONFIG")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
