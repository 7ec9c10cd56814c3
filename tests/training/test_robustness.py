"""Runs with odd data, odd hooks, at odd moments: none hangs, none loses a batch or an error."""

import contextlib
import itertools
import queue
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from regression import init_params, loss_fn

from ftrain import Hook, TrainState, make_step, optimizers
from ftrain.coordination import EndOfData, LooperThread
from ftrain.hooks import (
    Callback,
    CheckpointSaver,
    CrashBundle,
    Evaluator,
    FeedBatch,
    NonFiniteError,
    StopAtStep,
    StopOnNaN,
    StopWhen,
    WaitForStep,
)
from ftrain.tasks.digits import classify, init_classifier
from ftrain.training import Loop, Scaffold, at, every, fusion, read_crash
from ftrain.training.compiled_step import CompiledStep

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("no_thread_left")]
ADAM = optimizers.adam(0.05)
STEP = make_step(loss_fn, ADAM)
FUSES = pytest.mark.parametrize("fuse", [1, 5, "auto"])


def make_state():
    return TrainState.create(init_params(), ADAM)


def drive(data, hooks=(), step=STEP, state=None, **options):
    with Loop(step, make_state if state is None else state, data, hooks=hooks, **options) as loop:
        while not loop.should_stop():
            loop.advance()
    return loop


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.replace(rng=None))]


def lost():
    return jax.errors.JaxRuntimeError("UNAVAILABLE: gone")


def test_a_thread_that_fails_while_the_run_waits_for_its_data(pipeline):
    waiting = queue.Queue()
    died = threading.Event()

    class Producer(Hook):
        def begin(self, report):
            waiting.put(pipeline.batch(0))
            LooperThread(report.coordinator, target=self.produce, name="producer").start()

        def produce(self):
            died.set()
            raise OSError("the producer died")

    def stream():
        while not (died.is_set() and waiting.empty()):
            with contextlib.suppress(queue.Empty):
                yield waiting.get(timeout=0.1)

    with pytest.raises(OSError, match="the producer died"):
        drive(stream(), [Producer()])


def test_an_interrupt_while_the_run_waits_for_data_saves(pipeline, tmp_path):
    release = threading.Event()

    def stream():
        yield from (pipeline.batch(step) for step in range(7))
        release.wait(240)

    class Interrupt(Hook):
        """After the last batch, when the loop can only wait for another one."""

        when = at(7)

        def after_step(self, report):
            thread.start()

    saver = CheckpointSaver(tmp_path)
    with Loop(STEP, make_state, stream(), hooks=[saver, Interrupt()], fuse=1) as loop:
        thread = threading.Timer(
            0.05, loop.interrupt, ["SIGINT"]
        )  # by then it waits, or is about to
        while not loop.should_stop():
            loop.advance()
        thread.join()
        release.set()
    assert loop.stop_reason == "SIGINT"
    assert saver.manager.steps() == [7]


@pytest.mark.parametrize("last", [15, 18])
def test_a_recovery_after_a_stop_was_asked_for_ends_at_the_same_step(pipeline, tmp_path, last):
    class FailAfterStop(Hook):
        when = at(last)
        left = 1

        def after_step(self, report):
            if self.left:
                self.left -= 1
                raise lost()

    hooks = [CheckpointSaver(tmp_path, when=every(steps=5)), StopAtStep(last), FailAfterStop()]
    assert drive(pipeline, hooks).steps_taken == last


def test_a_stop_that_was_asked_for_before_the_run_is_entered(pipeline):
    loop = Loop(STEP, make_state, pipeline)
    loop.request_stop("changed my mind")
    with loop:
        assert loop.should_stop()
    assert (loop.steps_taken, loop.stop_reason) == (0, "changed my mind")


def test_a_recovery_does_not_lose_the_stop_that_another_thread_asked_for(pipeline):
    class StopElsewhereAndFail(Hook):
        when = at(9)

        def after_step(self, report):
            thread = threading.Thread(target=report.stop, args=["from elsewhere"])
            thread.start()
            thread.join()
            raise lost()

    loop = drive(pipeline, [StopElsewhereAndFail(), StopAtStep(40)], recoveries=1)
    assert loop.stop_reason == "from elsewhere"


def test_an_error_with_a_step_of_its_own_is_raised_as_it_is(pipeline):
    class OddError(RuntimeError):
        def step(self):
            pass

    closed = []

    class Failing(Hook):
        when = at(3)

        def after_step(self, report):
            raise OddError("the real error")

        def close(self):
            closed.append(True)

    with pytest.raises(OddError, match="the real error"):
        drive(pipeline, [Failing()])
    assert closed == [True]


def test_a_hook_that_ends_the_run_while_other_calls_are_in_flight(pipeline):
    ended = []

    class Ending(Hook):
        when = every(steps=1)
        needs_state = False

        def after_step(self, report):
            if report.step >= 3:
                raise EndOfData

        def end(self, report):
            ended.append(report.step)

    drive(pipeline, [Ending()], fuse=1)
    assert len(ended) == 1


@FUSES
def test_sixty_four_bits_in_a_context_of_the_thread(pipeline, fuse):
    def batches():
        return [
            {k: v.astype(np.float64) for k, v in pipeline.batch(step).items()} for step in range(40)
        ]

    with jax.enable_x64(True):
        params = {"w": jnp.zeros(3, jnp.float64), "b": jnp.zeros((), jnp.float64)}
        loop = drive(batches(), state=TrainState.create(params, ADAM), fuse=fuse)
        assert loop.steps_taken == 40
        assert loop.state.params["w"].dtype == jnp.float64


def test_a_fused_call_that_cannot_be_compiled_does_not_end_the_run(pipeline, monkeypatch):
    finish = CompiledStep.finish
    notices = []

    def fail(self, piece, lowered):
        if piece.count > 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: too large")
        finish(self, piece, lowered)

    class Notices(Hook):
        def begin(self, report):
            report.listen(notice=notices.append)

    monkeypatch.setattr(CompiledStep, "finish", fail)
    monkeypatch.setattr(fusion, "LONG_STEP", float("inf"))  # whatever else the machine is busy with
    for fuse in (5, "auto"):
        assert drive(pipeline, [StopAtStep(500), Notices()], fuse=fuse).steps_taken == 500
    assert all("cannot be compiled: RESOURCE_EXHAUSTED" in notice for notice in notices)
    assert len(notices) == 2


@FUSES
@pytest.mark.parametrize(
    "batch", [{}, None, {"scale": 2.0}, (np.ones(4, np.float32), np.float32(3))], ids=str
)
def test_odd_batches(batch, fuse):
    def loss(params, batch, rng):
        numbers = [jnp.sum(jnp.asarray(leaf)) for leaf in jax.tree.leaves(batch)]
        return jnp.sum(params["w"] ** 2) + jnp.mean(jax.random.normal(rng, (3,))) + sum(numbers)

    assert drive([batch] * 60, step=make_step(loss, ADAM), fuse=fuse).steps_taken == 60


@FUSES
@pytest.mark.parametrize("error", [EndOfData, ValueError])
def test_no_batch_is_lost_before_the_data_fail(pipeline, fuse, error):
    told = []

    def stream():
        yield from (pipeline.batch(step) for step in range(67))
        raise error("here")

    hooks = [
        Callback(lambda report: told.append(report.step), when=every(steps=1), needs_state=False)
    ]
    if error is EndOfData:
        assert drive(stream(), fuse=fuse).steps_taken == 67
    else:
        with pytest.raises(ValueError, match="here"):
            drive(stream(), hooks, fuse=1)
        assert told[-1] >= 67 - 8  # calls in flight are not told of any more


@pytest.mark.standard_promotion  # the loss adds integers
def test_batches_of_a_form_that_was_not_tried_are_not_fused():
    rng = np.random.default_rng(0)

    def batch(size):
        image = rng.random((4, size, size, 1), np.float32)
        return {
            "image": np.resize(image, (4, 8, 8, 1)) if size == 8 else image,
            "label": rng.integers(0, 10, 4),
        }

    batches = [batch(8) for _ in range(30)]
    batches += [
        {"image": np.concatenate([b["image"]] * 2), "label": np.concatenate([b["label"]] * 2)}
        for b in batches
    ]

    def loss(params, batch, rng):
        logits = classify(params, batch["image"])
        return jnp.mean(logits**2) + 0 * jnp.sum(batch["label"])

    def train(fuse):
        state = TrainState.create(init_classifier(jax.random.key(0), channels=4, hidden=8), ADAM)
        with pytest.warns(
            UserWarning, match="batch of step 31 differs from the first one in shape"
        ):
            return bits(drive(batches, step=make_step(loss, ADAM), state=state, fuse=fuse).state)

    assert train(5) == train(1)


@FUSES
def test_parameters_that_the_user_has_placed_stay_there(pipeline, fuse):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("model"))
    params = {"w": jax.device_put(jnp.zeros((4, 3)), split), "b": jnp.zeros(())}

    def loss(params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"].T).sum(axis=1) + params["b"] - batch["y"]) ** 2

    state = TrainState.create(params, optimizers.gradient_descent(0.1))
    state = jax.device_put(
        state, jax.tree.map(lambda leaf: jax.NamedSharding(mesh, jax.P()), state)
    )
    state = state.replace(params=state.params | {"w": jax.device_put(state.params["w"], split)})
    step = make_step(loss, optimizers.gradient_descent(0.1))
    loop = drive(pipeline, [StopAtStep(60)], step=step, state=state, fuse=fuse)
    assert loop.state.params["w"].sharding.spec == jax.P("model")


def test_a_recovery_does_not_mix_up_the_forms_of_batches(pipeline):
    small = {name: array[:4] for name, array in pipeline.batch(0).items()}
    batches = itertools.chain([pipeline.batch(0)] * 9, [small] * 20)

    class Failing(Hook):
        when = at(9)
        left = 1

        def after_step(self, report):
            if self.left:
                self.left -= 1
                raise lost()

    with pytest.warns(
        UserWarning, match="differs from the first one in shape|have no random access"
    ):
        loop = drive(batches, [Failing()], fuse=1)
    assert loop.steps_taken == 20


def test_entries_that_are_fed_may_change_their_shape(pipeline):
    def loss(params, batch, rng):
        return loss_fn(params, batch, rng)[0] + 0 * jnp.sum(batch["extra"])

    feed = FeedBatch(lambda step: {"extra": np.ones(3 if step < 5 else 4, np.float32)})
    with pytest.warns(
        UserWarning, match=r"batch of step 6 .* extra is float32\[4\], it was float32\[3\]"
    ):
        assert drive(pipeline, [feed, StopAtStep(9)], step=make_step(loss, ADAM)).steps_taken == 9


def test_arrays_that_a_scaffold_puts_into_the_state_stay_whole(pipeline):
    pretrained = {"w": jnp.ones(3), "b": jnp.ones(())}
    scaffold = Scaffold(init_fn=lambda state: state.replace(params=pretrained))
    drive(pipeline, [StopAtStep(5)], scaffold=scaffold)
    assert float(pretrained["w"].sum()) == 3.0


def test_steps_whose_batches_hooks_have_changed_are_not_taken_again(pipeline, tmp_path):
    def loss(params, batch, rng):
        return loss_fn(params, batch, rng)[0] + jnp.where(batch["extra"][0] == 6, jnp.nan, 0.0)

    feed = FeedBatch(lambda step: {"extra": np.full(8, step, np.float32)})
    hooks = [feed, StopOnNaN(locate=True), CrashBundle(tmp_path)]
    with pytest.raises(
        NonFiniteError, match=r"Where it began is unknown: steps cannot be taken again"
    ):
        drive(pipeline, hooks, step=make_step(loss, ADAM))
    crash = read_crash(tmp_path)
    assert crash.facts["state_step"] == 0
    assert crash.batch(like=pipeline.batch(0) | {"extra": 0})["extra"][0] == 6


def test_a_source_that_waits_for_steps_does_not_wait_for_ever(pipeline):
    taken = threading.Semaphore(8)

    def stream():
        for step in range(200):
            assert taken.acquire(timeout=20)
            yield pipeline.batch(step)

    release = Callback(lambda report: taken.release(), when=every(steps=1), needs_state=False)
    assert drive(stream(), [release]).steps_taken == 200


@pytest.mark.parametrize("first", ["stop", "evaluator"])
def test_early_stopping_sees_an_evaluation_whatever_comes_first(pipeline, first):
    stop = StopWhen("eval/x", patience=1, when=every(steps=5))
    evaluator = Evaluator(lambda params: {"x": 1.0}, when=every(steps=5))
    hooks = [stop, evaluator] if first == "stop" else [evaluator, stop]
    assert drive(pipeline, [*hooks, StopAtStep(100)]).steps_taken == 10


def test_a_step_of_ones_own_without_a_gradient_norm_is_guarded(pipeline):
    def step(state, batch):
        state, _ = STEP(state, batch)
        loss = jnp.where(state.step == 4, jnp.nan, 1.0)
        return state, {"loss": loss, "harmless": jnp.inf}

    with pytest.raises(NonFiniteError, match="loss is nan at step 4"):
        drive(pipeline, [StopOnNaN()], step=step)


def test_a_bundle_keeps_batches_in_half_precision(pipeline, tmp_path):
    def loss(params, batch, rng):
        return jnp.sum(params["w"]) * jnp.sum(batch["x"].astype(jnp.float32)) + jnp.nan

    batch = {"x": np.ones((2, 3), ml_dtypes.bfloat16)}
    with pytest.raises(NonFiniteError):
        drive([batch] * 3, [StopOnNaN(), CrashBundle(tmp_path)], step=make_step(loss, ADAM))
    kept = read_crash(tmp_path).batch(like=batch)
    assert kept["x"].dtype == ml_dtypes.bfloat16
    assert float(kept["x"].astype(np.float32).sum()) == 6.0


def test_waiting_for_another_run_ends_when_this_one_is_interrupted(pipeline, tmp_path):
    loop = Loop(STEP, make_state, pipeline, hooks=[WaitForStep(5, tmp_path, poll_secs=0.01)])
    timer = threading.Timer(0.2, loop.interrupt, ["SIGINT"])
    timer.start()
    with loop:
        assert loop.should_stop()
    timer.join()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"state": {"w": jnp.zeros(3)}},
            "a run needs a TrainState, or a function that makes one, got a dict",
        ),
        (
            {"hooks": [Callback(print, when=100)]},
            r"Callback\.when must be a trigger, such as every\(steps=100\), got 100",
        ),
    ],
)
def test_what_is_no_state_or_no_trigger(pipeline, options, message):
    with pytest.raises(TypeError, match=message):
        drive(pipeline, **options)
