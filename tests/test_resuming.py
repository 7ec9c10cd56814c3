"""The same call resumes a run; a different call is refused with what differs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regression import init_params, loss_fn, make_arrays

import ftrain
from ftrain.checkpoints import InUseError, hold, latest_checkpoint
from ftrain.data import ArraySource, Pipeline
from ftrain.hooks import CheckpointSaver, Logging
from ftrain.training import RunMismatchError

pytestmark = pytest.mark.usefixtures("no_thread_left")
ADAM = ftrain.optimizers.adam
WAY_OUT = "overwrite=True .* accept_changes=True .* another directory"


class Calls:
    """`train` in one directory with changes to single arguments; `lines` has the log lines."""

    def __init__(self, directory):
        self.directory = directory
        self.lines = []

    def __call__(self, *, data=None, loss=loss_fn, **changes):
        data = data or Pipeline(ArraySource(make_arrays()), batch_size=8, seed=3)
        options = {"optimizer": ADAM(1e-3), "steps": 4, "directory": self.directory}
        hooks = [Logging(write=self.lines.append)]
        return ftrain.train(loss, init_params(), data, **(options | {"hooks": hooks} | changes))


@pytest.fixture
def train(tmp_path):
    return Calls(tmp_path / "run")


def doubled(params, batch, rng):
    loss, metrics = loss_fn(params, batch, rng)
    return 2 * loss, metrics


def with_another_metric(params, batch, rng):
    loss, metrics = loss_fn(params, batch, rng)
    return loss, metrics | {"twice": 2 * loss}


def other_data(**changes):
    options = {"batch_size": 8, "seed": 3} | changes
    return Pipeline(ArraySource(make_arrays(options.pop("examples", 64))), **options)


CHANGES = {
    "learning rate": ({"optimizer": ADAM(2e-3)}, "the optimizer differs"),
    "optax's": ({"optimizer": optax.adam(1e-3)}, "the optimizer differs"),
    "loss": ({"loss": doubled}, "the loss differs"),
    "loss and optimizer": (
        {"loss": doubled, "optimizer": ADAM(2e-3)},
        "the optimizer differs; the loss differs",
    ),
    "seed": ({"seed": 1}, "seed was 0, now 1"),
    "clipping": ({"clip_global_norm": 1.0}, r"clip_global_norm was None, now 1\.0"),
    "batch size": ({"data": other_data(batch_size=4)}, "data: batch_size was 8, now 4"),
    "seed of the data": ({"data": other_data(seed=4)}, "data: seed was 3, now 4"),
    "examples": ({"data": other_data(examples=32)}, "data: examples was 64, now 32"),
}


@pytest.mark.standard_promotion  # optax.adam
@pytest.mark.parametrize(("change", "reported"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("steps", [4, 6], ids=["nothing left", "steps left"])
def test_a_call_with_something_else_is_refused_and_says_what(train, change, reported, steps):
    before = train()
    with pytest.raises(RunMismatchError, match=rf"has a different run: {reported}\n{WAY_OUT}"):
        train(**change, steps=steps)
    np.testing.assert_array_equal(train().params["w"], before.params["w"])  # nothing was changed


def test_a_rate_that_is_kept_in_the_state_is_compared_too(train):
    train(optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.05))
    with pytest.raises(RunMismatchError, match="the optimizer differs"):
        train(optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"steps": 9},
        {"optimizer": ADAM(1e-3)},
        {"loss": with_another_metric},
        {"loss": lambda params, batch, rng: loss_fn(params, batch, rng)},
        {"loss": jax.jit(loss_fn)},
        {"learning_rate": 0.5},
        {"fuse": 1},
    ],
    ids=[
        "call",
        "more steps",
        "equal optimizer",
        "more metrics",
        "wrapped loss",
        "compiled loss",
        "shown",
        "fusing",
    ],
)
def test_a_call_that_trains_the_same_is_not_refused(train, same):
    train()
    train(**({"steps": 6} | same))


def test_nothing_left_to_do_is_told_once(train):
    train()
    assert not [line for line in train.lines if "nothing is left" in line]
    train()
    reported = [line for line in train.lines if "nothing is left" in line]
    assert len(reported) == 1
    assert re.search(
        r"has 4 steps already; pass more steps, overwrite=True .* another directory", reported[0]
    )


def test_changes_can_be_accepted_and_are_told_and_kept(train):
    train()
    state = train(optimizer=ADAM(2e-3), steps=6, accept_changes=True)
    assert int(state.step) == 6
    assert any("is resumed with changes: the optimizer differs" in line for line in train.lines)
    train(optimizer=ADAM(2e-3), steps=8)  # the run's optimizer from now on
    assert (train.directory / "run.1.json").exists()
    with pytest.raises(RunMismatchError, match="the optimizer differs"):
        train(optimizer=ADAM(1e-3), steps=9)


def test_overwrite_sets_the_old_run_aside_and_says_where(train, tmp_path):
    first = train()
    (train.directory / "notes.txt").write_text("mine")
    second = train(optimizer=ADAM(0.1), overwrite=True)
    assert any(f"was set aside as {tmp_path / 'run.1'}" in line for line in train.lines)
    old, new = (
        ftrain.checkpoints.open_reader(tmp_path / name).read("params/w")
        for name in ("run.1", "run")
    )
    np.testing.assert_array_equal(old, first.params["w"])
    np.testing.assert_array_equal(new, second.params["w"])
    assert not np.array_equal(old, new)
    assert (train.directory / "notes.txt").exists()  # it is no file of the run
    train(optimizer=ADAM(0.2), overwrite=True)
    assert latest_checkpoint(tmp_path / "run.2") == tmp_path / "run.2" / "checkpoints" / "4"


def test_overwrite_of_nothing_is_a_new_run(train, tmp_path):
    train(overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_is_at_work_is_not_set_aside(train):
    train()
    with (
        hold(train.directory / "checkpoints" / "saver.lock", "it is held"),
        pytest.raises(InUseError, match="is in use"),
    ):
        train(overwrite=True)
    assert latest_checkpoint(train.directory) is not None


def test_a_directory_of_before_resumes(train):
    train()
    (train.directory / "run.json").unlink()
    assert int(train(optimizer=ADAM(2e-3), steps=6).step) == 6


@pytest.mark.parametrize("contents", ["", "{", "[]", '{"made_with": 1}', "null"])
def test_a_record_that_cannot_be_read_stops_no_run(train, contents):
    train()
    (train.directory / "run.json").write_text(contents)
    assert int(train(optimizer=ADAM(2e-3), steps=6).step) == 6


def test_another_version_of_jax_is_no_difference(train):
    train()
    path = train.directory / "run.json"
    record = json.loads(path.read_text())
    record["made_with"]["jax"] = "0.1.0"
    record["fingerprints"] = dict.fromkeys(record["fingerprints"], "of another jax")
    path.write_text(json.dumps(record))
    assert int(train(steps=6).step) == 6
    with pytest.raises(RunMismatchError, match="the optimizer differs"):  # it was recorded again
        train(optimizer=ADAM(2e-3), steps=8)


def test_another_number_of_devices_is_no_difference(train):
    train()
    train(steps=6, mesh=ftrain.cluster.make_mesh())
    train(steps=8)


def test_a_step_that_cannot_be_traced_apart_stops_no_run(train):
    train(optimizer=optax.lbfgs())
    assert int(train(optimizer=optax.lbfgs(), steps=6).step) == 6
    with pytest.raises(RunMismatchError, match="the step differs"):
        train(optimizer=optax.lbfgs(memory_size=10, scale_init_precond=False), steps=8)


def test_a_run_of_a_step_is_compared_too(pipeline, tmp_path):
    def run(step, **options):
        saver = CheckpointSaver(tmp_path / "checkpoints", when=ftrain.every(steps=1))
        state = ftrain.TrainState.create(init_params(), ADAM(1e-3))
        hooks = [Logging(write=lambda line: None), saver]
        with ftrain.Run(step, state, pipeline, directory=tmp_path, hooks=hooks, **options) as run:
            while not run.should_stop():
                run.advance()

    run(ftrain.make_step(loss_fn, ADAM(1e-3)), steps=2)
    run(ftrain.make_step(loss_fn, ADAM(1e-3)), steps=3)
    other = ftrain.make_step(loss_fn, ADAM(2e-3))
    with pytest.raises(RunMismatchError, match="the optimizer differs"):
        run(other, steps=4)
    with pytest.raises(RunMismatchError, match="the step differs"):  # a step not made by make_step
        run(lambda state, batch: other(state, batch), steps=4)
    with pytest.raises(RunMismatchError, match=r"clip_global_norm was None, now 1\.0"):
        run(ftrain.make_step(loss_fn, ADAM(1e-3), clip_global_norm=1.0), steps=4)


def test_data_that_are_no_pipeline_are_compared_by_what_the_step_computes(train, pipeline):
    batches = [pipeline.batch(step) for step in range(9)]
    train(data=batches)
    with pytest.warns(UserWarning, match="have no random access"):
        train(data=batches, steps=5)
    with pytest.raises(RunMismatchError, match="the loss differs"):
        train(data=batches, loss=doubled, steps=6)


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import ftrain
from regression import init_params, loss_fn, make_arrays
data = ftrain.data.Pipeline(ftrain.data.ArraySource(make_arrays()), batch_size=8, seed=3)
ftrain.train(
    loss_fn,
    init_params(),
    data,
    optimizer=ftrain.optimizers.adam(float(sys.argv[4])),
    steps=int(sys.argv[3]),
    directory=sys.argv[2],
)
"""


def test_another_process_resumes_the_same_code_and_refuses_another(tmp_path):
    def run(steps, rate, seed):
        arguments = [str(Path(__file__).parent), str(tmp_path / "run"), f"{steps}", f"{rate}"]
        environ = {
            "PYTHONHASHSEED": f"{seed}",
            "PATH": "",
            "JAX_PLATFORMS": "cpu",
            "HOME": str(tmp_path),
        }
        environ["PYTHONPATH"] = str(Path(ftrain.__file__).parents[1])
        command = [sys.executable, "-c", PROGRAM, *arguments]
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=240, check=False
        )

    assert run(4, 1e-3, 1).returncode == 0
    resumed = run(6, 1e-3, 2)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step 4" in resumed.stdout
    refused = run(8, 2e-3, 3)
    assert refused.returncode != 0
    assert "the optimizer differs" in refused.stderr


def test_large_constants_are_compared_by_their_shape_only():
    from ftrain.training.fingerprint import fingerprint

    def of(table):
        return fingerprint(lambda x: x * jnp.asarray(table).sum(), jnp.ones(3))

    rng = np.random.default_rng(0)
    assert of(rng.random(5000)) == of(rng.random(5000)) != of(rng.random(6000))
    assert of(rng.random(5)) != of(rng.random(5))
