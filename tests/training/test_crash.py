"""Steps that fail are kept, and can be seen again."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regression import init_params, loss_fn

import ftrain
from ftrain import Hook, TrainState, make_step, optimizers
from ftrain.hooks import CheckpointSaver, CrashBundle, NonFiniteError, StopAtStep, StopOnNaN
from ftrain.training import Loop, ReplayError, every, locate
from ftrain.training.compiled_step import CompiledStep
from ftrain.training.crash import read_crash
from ftrain.training.replay import find_nan_origin, forward

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("no_thread_left")]
ADAM = optimizers.adam(0.05)


def diverging(params, batch, rng):
    """Becomes NaN at its 23rd step: the square root's slope is infinite at zero."""
    value, metrics = loss_fn(params, batch, rng)
    distance = jnp.abs(22.0 - params["count"])
    return value - params["count"] + 0 * jnp.sqrt(distance), metrics


def counting(params):
    return params | {"count": jnp.zeros(())}


# Adds one to `count` at each step: the gradient of -count is -1.
COUNTING = optimizers.gradient_descent(1.0)


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.replace(rng=None))]


def train(data, hooks, loss=diverging, **options):
    step = make_step(loss, COUNTING, clip_global_norm=None)
    state = TrainState.create(
        {"w": jnp.zeros(3), "b": jnp.zeros(()), "count": jnp.zeros(())}, COUNTING
    )
    with Loop(step, state, data, hooks=hooks, **options) as loop:
        while not loop.should_stop():
            loop.advance()
    return step, state


def small(pipeline):
    """Batches so small that a rate of one does not diverge by itself."""
    return type(pipeline)(
        ftrain.data.ArraySource({k: v * 0.1 for k, v in pipeline.source.arrays.items()}),
        batch_size=8,
    )


@pytest.mark.parametrize("fuse", [1, 10])
@pytest.mark.parametrize("saves", [True, False])
def test_a_bundle_holds_the_state_before_the_step_and_its_batch(pipeline, tmp_path, fuse, saves):
    data = small(pipeline)
    hooks = [StopOnNaN(), CrashBundle(tmp_path)]
    hooks += [CheckpointSaver(tmp_path / "checkpoints", when=every(steps=5))] if saves else []
    with pytest.raises(NonFiniteError, match="gradient_norm is nan at step 23") as caught:
        train(data, hooks, fuse=fuse)
    way = f'ftrain.training.read_crash("{tmp_path}")'
    assert (
        f"kept in {tmp_path / 'crash' / '23'}; to take the step again: {way}"
        in caught.value.__notes__
    )

    crash = read_crash(tmp_path)
    step = make_step(diverging, COUNTING)
    expected = TrainState.create(
        {"w": jnp.zeros(3), "b": jnp.zeros(()), "count": jnp.zeros(())}, COUNTING
    )
    like = expected
    compiled = jax.jit(step)
    for number in range(22):
        expected, _ = compiled(expected, data.batch(number))
    state = crash.state(like=like)
    assert bits(state) == bits(expected)
    batch = crash.batch(like=data.batch(0))
    np.testing.assert_array_equal(batch["x"], data.batch(22)["x"])
    facts = json.loads((tmp_path / "crash" / "23" / "crash.json").read_text())
    assert facts["error"] == "NonFiniteError"
    assert facts["state_step"] == 22
    assert facts["batch"]["indices"] == data.indices(22).tolist()
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["rng"] == np.asarray(jax.random.key_data(like.rng)).tolist()

    found = locate(step, state, batch)
    assert found[0] == "gradients/count (nan)"
    (phrase,) = [each for each in find_nan_origin(step, state, batch) if "NaN" in each]
    assert "test_crash.py" in phrase
    assert "in diverging" in phrase


def test_locate_names_the_first_leaf_in_the_error(pipeline):
    with pytest.raises(
        NonFiniteError, match=r"at step 23; .*\nIt began in gradients/count \(nan\)\."
    ):
        train(small(pipeline), [StopOnNaN(locate=True)], fuse=8)


def test_locate_works_where_the_run_is_only_stopped(pipeline):
    step = make_step(diverging, COUNTING)
    state = TrainState.create(counting(init_params()), COUNTING)
    with Loop(
        step, state, small(pipeline), hooks=[StopOnNaN(action="stop", locate=True)], fuse=8
    ) as loop:
        while not loop.should_stop():
            loop.advance()
    assert loop.stop_reason.startswith(
        "gradient_norm is nan at step 23\nIt began in gradients/count (nan)."
    )


def test_a_stopped_run_does_not_save_what_is_not_finite(pipeline, tmp_path):
    saver = CheckpointSaver(tmp_path, when=every(steps=10))
    train(small(pipeline), [StopOnNaN(action="stop"), saver], fuse=1)
    assert saver.manager.steps() == [10, 20]


def test_bad_data_are_named_first(pipeline):
    batch = pipeline.batch(0)
    batch["x"][2, 1] = np.inf
    step = make_step(loss_fn, ADAM)
    found = locate(step, TrainState.create(init_params(), ADAM), batch)
    assert found[0] == "batch/x (1 of 24 values non-finite, the first at [2, 1])"


def test_data_that_cannot_be_asked_keep_the_batch_and_the_newest_state(pipeline, tmp_path):
    data = small(pipeline)
    batches = [data.batch(step) for step in range(40)]
    saver = CheckpointSaver(tmp_path / "checkpoints", when=every(steps=5))
    with pytest.raises(NonFiniteError):
        train(iter(batches), [StopOnNaN(), CrashBundle(tmp_path), saver], fuse=1)
    crash = read_crash(tmp_path, 23)
    np.testing.assert_array_equal(crash.batch(like=batches[0])["x"], batches[22]["x"])
    assert crash.facts["state_step"] == 20
    assert crash.facts["notes"] == [
        "steps 21 to 22 cannot be taken again: the data have no random access"
    ]


def test_an_exception_in_the_step_keeps_the_state_too(pipeline, tmp_path):
    def broken(params, batch, rng):
        def check(value):
            if value > 0:
                raise OSError("the callback failed")
            return value

        worst = jnp.max(batch["number"]) - 4
        return loss_fn(params, batch, rng)[0] + jax.pure_callback(check, worst, worst)

    batches = [pipeline.batch(n) | {"number": np.full(8, n, np.float32)} for n in range(9)]
    step = make_step(broken, ADAM)

    def run():
        state = TrainState.create(init_params(), ADAM)
        with Loop(step, state, batches, hooks=[CrashBundle(tmp_path)], fuse=1) as loop:
            while not loop.should_stop():
                loop.advance()

    with pytest.raises(jax.errors.JaxRuntimeError, match="the callback failed"):
        run()
    assert read_crash(tmp_path).step == 6


def test_an_exception_while_tracing_keeps_the_very_state(pipeline, tmp_path):
    calls = []

    def late(params, batch, rng):
        calls.append(batch["x"].shape)
        if batch["x"].shape[0] == 4:
            raise ValueError("no batches of four")
        return loss_fn(params, batch, rng)

    whole = pipeline.batch(0)
    batches = [whole, whole, {name: array[:4] for name, array in whole.items()}]

    def run():
        state = TrainState.create(init_params(), ADAM)
        with Loop(
            make_step(late, ADAM), state, batches, hooks=[CrashBundle(tmp_path)], fuse=1
        ) as loop:
            while not loop.should_stop():
                loop.advance()

    with (
        pytest.warns(UserWarning, match="batch of step 3"),
        pytest.raises(ValueError, match="no batches of four"),
    ):
        run()
    assert read_crash(tmp_path).facts["state_step"] == 2


def test_a_hook_that_fails_leaves_no_bundle(pipeline, tmp_path):
    class Failing(Hook):
        when = every(steps=3)

        def after_step(self, report):
            raise RuntimeError("not the step's fault")

    with pytest.raises(RuntimeError, match="not the step's fault"):
        train(small(pipeline), [Failing(), CrashBundle(tmp_path)])
    with pytest.raises(LookupError, match="there is no crash to replay"):
        read_crash(tmp_path)


def test_a_crash_that_was_not_is_named(pipeline, tmp_path):
    with pytest.raises(NonFiniteError):
        train(small(pipeline), [StopOnNaN(), CrashBundle(tmp_path)])
    with pytest.raises(LookupError, match="there is no crash of step 7; the steps with one are 23"):
        read_crash(tmp_path, 7)


def test_taking_steps_again_has_a_limit(pipeline):
    program = CompiledStep(make_step(loss_fn, ADAM))
    state = TrainState.create(init_params(), ADAM)
    with pytest.raises(
        ReplayError, match=r"taking steps 1 to 99999 again takes longer than 0.01 s"
    ):
        forward(program, state, pipeline, 100_000, limit=0.01)


def test_a_run_in_a_directory_keeps_crashes_by_itself(pipeline, tmp_path):
    def loss(params, batch, rng):
        return jnp.log(params["b"]), {}

    quiet = ftrain.hooks.Logging(write=lambda line: None)
    with pytest.raises(NonFiniteError):
        ftrain.train(
            loss,
            init_params(),
            pipeline,
            optimizer=ADAM,
            steps=9,
            directory=tmp_path,
            hooks=[quiet],
        )
    assert read_crash(tmp_path).step == 1


def test_a_bundle_that_cannot_be_written_does_not_hide_the_error(pipeline, tmp_path):
    (tmp_path / "crash").write_text("in the way")
    with pytest.raises(NonFiniteError) as caught:
        train(small(pipeline), [StopOnNaN(), CrashBundle(tmp_path), StopAtStep(40)])
    assert any("closing failed too" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("facts", ["{", "[]", '{"step": "x"}', "[" * 100_000])
def test_a_damaged_bundle_is_named(tmp_path, facts):
    bundle = tmp_path / "crash" / "3"
    bundle.mkdir(parents=True)
    (bundle / "crash.json").write_text(facts)
    with pytest.raises(LookupError, match=r"crash\.json is damaged"):
        read_crash(tmp_path)
