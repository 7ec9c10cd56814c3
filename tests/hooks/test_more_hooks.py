"""Stopping early, calling, feeding, waiting, profiling, and savers that must not meet."""

import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from regression import init_params, loss_fn

from ftrain import TrainState, make_step, optimizers
from ftrain.checkpoints import CheckpointManager, InUseError
from ftrain.hooks import (
    Callback,
    CheckpointSaver,
    Evaluator,
    FeedBatch,
    FinalOps,
    Logging,
    SaveListener,
    StepCounter,
    StopAtStep,
    StopOnNaN,
    StopWhen,
    SummarySaver,
    WaitForStep,
)
from ftrain.training import Hook, Loop, at, every, first

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = optimizers.gradient_descent(0.1)


def drive(hooks, data, loss=loss_fn, **options):
    state = TrainState.create(init_params(), SGD)
    with Loop(make_step(loss, SGD), state, data, hooks=hooks, **options) as loop:
        while not loop.should_stop():
            loop.advance()
    return loop


class Publishing(Hook):
    """Publishes one number after another."""

    def __init__(self, numbers, name="eval/score", when=None):
        self.numbers = list(numbers)
        self.name = name
        self.when = when or every(steps=5)

    def after_step(self, report):
        if self.numbers:
            report.publish({self.name: self.numbers.pop(0)})


def test_stopping_at_a_threshold_of_a_metric(pipeline):
    losses = {}
    watch = Callback(
        lambda report: losses.update({report.step: report.read("loss")}), when=every(steps=5)
    )
    loop = drive(
        [watch, StopWhen("loss", threshold=0.01, when=every(steps=5)), StopAtStep(900)], pipeline
    )
    assert loop.steps_taken == next(step for step, loss in losses.items() if loss <= 0.01)
    assert "which reaches the threshold 0.01" in loop.stop_reason


@pytest.mark.parametrize(
    ("numbers", "options", "stops"),
    [
        ([3, 2, 1, 1, 1, 0], {"patience": 2}, 25),
        ([1, 2, 3, 3, 3, 9], {"patience": 2, "mode": "max"}, 25),
        ([3, 2, 1.9, 1.85, 1], {"patience": 2, "least_change": 0.5}, 20),
        ([1, 2, 5, 9], {"threshold": 5, "mode": "max"}, 15),
        ([4, float("nan"), float("nan"), 1], {"patience": 2}, 15),
    ],
)
def test_stopping_when_what_a_hook_publishes_gets_no_better(pipeline, numbers, options, stops):
    loop = drive([Publishing(numbers), StopWhen("eval/score", **options), StopAtStep(60)], pipeline)
    assert loop.steps_taken == stops


def test_the_order_of_the_hooks_does_not_matter_for_what_is_published(pipeline):
    stop = StopWhen("eval/score", patience=1, when=every(steps=5))
    assert drive([Publishing([1, 1]), stop, StopAtStep(60)], pipeline).steps_taken == 10
    assert drive([stop, Publishing([1, 1]), StopAtStep(60)], pipeline).steps_taken in (10, 60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs patience, or a threshold"),
        ({"patience": 0}, "patience must be >= 1"),
        ({"patience": 1, "mode": "least"}, 'mode must be "min" or "max"'),
    ],
)
def test_early_stopping_that_makes_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        StopWhen("loss", **options)


def test_a_callback_may_read_publish_and_stop(pipeline):
    seen = []

    def call(report):
        seen.append((report.step, int(report.state.step), report.examples))
        report.publish({"twice": 2.0})
        if report.step == 20:
            report.stop("enough")

    lines = []
    drive(
        [Callback(call, when=every(steps=10)), Logging(when=every(steps=10), write=lines.append)],
        pipeline,
    )
    assert seen == [(10, 10, 8), (20, 20, 8)]
    assert all("twice 2" in line for line in lines if line.startswith("step"))


@pytest.mark.parametrize("kind", [Callback, FeedBatch, FinalOps])
def test_what_is_no_function_is_refused(kind):
    with pytest.raises(TypeError, match="function must be callable, got 'print'"):
        kind("print")


def test_feeding_changes_what_the_step_sees(pipeline):
    def loss(params, batch, rng):
        return loss_fn(params, batch, rng)[0], {"fed": batch["extra"][0]}

    seen = []
    reader = Callback(lambda report: seen.append(report.read("fed")), when=every(steps=1))
    drive(
        [FeedBatch(lambda step: {"extra": np.full(8, step, np.float32)}), reader, StopAtStep(4)],
        pipeline,
        loss=loss,
    )
    assert seen == [0.0, 1.0, 2.0, 3.0]


def test_a_batch_that_is_no_dict_cannot_be_fed(pipeline):
    def loss(params, batch, rng):
        return jnp.sum(params["b"]) + jnp.mean(batch)

    with pytest.raises(TypeError, match="extra cannot be fed: the batch is a ndarray, not a dict"):
        drive([FeedBatch(lambda step: {"extra": 1})], [np.zeros(3, np.float32)], loss=loss)


def test_waiting_for_a_run_that_does_not_come(pipeline, tmp_path):
    with pytest.raises(
        TimeoutError, match=r"step 5 was not reached within 0\.02 s; the other run is at step 0"
    ):
        drive([WaitForStep(5, tmp_path, timeout=0.02, poll_secs=0.01)], pipeline)


def test_waiting_for_the_checkpoint_of_another_run(pipeline, tmp_path):
    def other():
        CheckpointManager(tmp_path).save(5, {"x": jnp.ones(2)})

    thread = threading.Timer(0.1, other)
    thread.start()
    loop = drive([WaitForStep(5, tmp_path, timeout=60, poll_secs=0.01), StopAtStep(2)], pipeline)
    thread.join()
    assert loop.steps_taken == 2
    assert CheckpointManager(tmp_path).latest() == 5


def test_a_wait_needs_somebody_to_wait_for():
    with pytest.raises(ValueError, match="either a directory of checkpoints or a function"):
        WaitForStep(5)


def test_two_savers_on_one_directory(pipeline, tmp_path):
    saver = CheckpointSaver(tmp_path, when=every(steps=5))
    with pytest.raises(
        InUseError, match=f"{tmp_path} is in use by process .*; wait for it, or choose another"
    ):
        drive([saver, CheckpointSaver(tmp_path)], pipeline)
    assert (
        drive([CheckpointSaver(tmp_path), StopAtStep(3)], pipeline).steps_taken == 3
    )  # the lock was let go


def test_a_saver_of_another_process(pipeline, tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from ftrain.checkpoints import hold\n"
        "lock = hold(Path(sys.argv[1]) / 'saver.lock', 'x')\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(InUseError, match=f"by process {process.pid}"):
        drive([CheckpointSaver(tmp_path)], pipeline)
    process.kill()
    process.communicate()
    assert drive([CheckpointSaver(tmp_path), StopAtStep(2)], pipeline).steps_taken == 2


def test_a_listener_that_is_none_is_refused(tmp_path):
    with pytest.raises(
        TypeError, match=r"listeners must be instances of ftrain\.hooks\.SaveListener"
    ):
        CheckpointSaver(tmp_path, listeners=[print])


def test_a_listener_is_told_when_the_checkpoint_can_be_read(pipeline, tmp_path):
    read = []

    class Reading(SaveListener):
        def after_save(self, step):
            like = TrainState.create(init_params(), SGD)
            read.append(int(CheckpointManager(tmp_path).restore(like=like, step=step).step))

    drive(
        [CheckpointSaver(tmp_path, when=every(steps=4), listeners=[Reading()]), StopAtStep(10)],
        pipeline,
    )
    assert read == [4, 8, 10]


def test_a_log_of_an_unknown_metric_says_so_once(pipeline):
    lines = []
    drive([Logging(["loss", "los"], when=first(2), write=lines.append), StopAtStep(3)], pipeline)
    assert [line.split(":")[0] for line in lines[:3]] == [
        "cannot log los at step 1; there are loss, learning_rate, gradient_norm, largest_error",
        "step 1",
        "step 2",
    ]


def test_a_log_waits_for_what_is_published_later(pipeline):
    lines = []
    logging = Logging(["loss", "eval/score"], when=every(steps=2), write=lines.append)
    drive([Publishing([1.0, 2.0], when=every(steps=4)), logging, StopAtStep(4)], pipeline)
    assert next(line for line in lines if line.startswith("step 4")).endswith("eval/score 1")


def test_early_stopping_on_a_metric_that_never_comes_is_said(pipeline):
    lines = []
    stop = StopWhen("los", patience=2, when=every(steps=5))
    drive([stop, Logging(write=lines.append), StopAtStep(20)], pipeline)
    assert any(
        line.startswith("StopWhen has never seen the metric los; at the end there are loss")
        for line in lines
    )


def test_examples_and_operations_per_second(pipeline):
    published = {}

    class Receiver(Hook):
        def begin(self, report):
            report.listen(published=self.receive)

        def receive(self, step, values):
            published.update(values)

    drive([StepCounter(when=at(20)), Receiver(), StopAtStep(20)], pipeline)
    assert published["examples_per_second"] == pytest.approx(8 * published["steps_per_second"])
    assert published["flops_per_second"] > published["steps_per_second"]


def test_a_writer_that_fails_ends_the_run_with_its_error(pipeline, tmp_path):
    class FullDisk(SummarySaver):
        def begin(self, report):
            super().begin(report)
            self._writer._writers[0].write = self.fail

        def fail(self, step, values):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left on device"):
        drive([FullDisk(tmp_path, when=every(steps=1)), StopAtStep(100_000)], pipeline)


def test_a_thread_of_a_hook_ends_the_run_with_its_error(pipeline):
    class Threaded(Hook):
        def begin(self, report):
            def work():
                with report.coordinator.stop_on_exception():
                    raise OSError("in the thread")

            thread = threading.Thread(target=work)
            report.coordinator.register_thread(thread)
            thread.start()

    ended = []

    class Ending(Hook):
        def end(self, report):
            ended.append(report.step)

    with pytest.raises(OSError, match="in the thread"):
        drive([Threaded(), Ending(), StopAtStep(10_000_000)], pipeline)
    assert ended == []


def test_evaluations_start_anew_when_a_run_recovers(pipeline):
    evaluator = Evaluator(lambda params: {"x": 1.0}, when=at(3))
    guard = StopOnNaN()
    drive([evaluator, guard, StopAtStep(5)], pipeline)
    assert drive([evaluator, guard, StopAtStep(5)], pipeline).steps_taken == 5
