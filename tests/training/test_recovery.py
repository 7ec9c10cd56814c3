import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regression import init_params, loss_fn

from ftrain import Hook, TrainState, make_step, optimizers
from ftrain.hooks import CheckpointSaver, StopAtStep, SummarySaver
from ftrain.summaries import read_metrics
from ftrain.training import Loop, NotReadyError, Scaffold, at, every
from ftrain.training.hook import StateSaver
from ftrain.training.recovery import can_be_retried

pytestmark = pytest.mark.usefixtures("no_thread_left")
MOMENTUM = optimizers.momentum(0.05, 0.9)
STEP = make_step(loss_fn, MOMENTUM)


def make_state():
    return TrainState.create(init_params(), MOMENTUM)


def lost(code="UNAVAILABLE"):
    return jax.errors.JaxRuntimeError(f"{code}: connection lost")


class Failing(Hook):
    """Fails at given steps, each time that it comes there, so many times."""

    def __init__(self, *steps, times=1, error=lost):
        self.when = at(*steps)
        self.left = dict.fromkeys(steps, times)
        self.error = error
        self.notices = []

    def after_step(self, report):
        if self.left[report.step]:
            self.left[report.step] -= 1
            raise self.error()

    def begin(self, report):
        report.listen(notice=self.notices.append)


def run(hooks, data, state=None, **options):
    with Loop(STEP, state or make_state, data, hooks=hooks, **options) as loop:
        while not loop.should_stop():
            loop.advance()
    return loop


@pytest.mark.parametrize("fuse", [1, 4])
@pytest.mark.parametrize("saves", [True, False])
def test_a_run_goes_on_and_ends_bit_for_bit_the_same(pipeline, tmp_path, fuse, saves):
    hooks = [CheckpointSaver(tmp_path, when=every(steps=5))] if saves else []
    failing = Failing(13, 27)
    whole = run([StopAtStep(40)], pipeline)
    recovered = run([*hooks, failing, StopAtStep(40)], pipeline, fuse=fuse)
    np.testing.assert_array_equal(whole.state.params["w"], recovered.state.params["w"])
    assert recovered.steps_taken == 40
    start = 10 if saves else 0
    assert (
        f"after step 13: UNAVAILABLE: connection lost\nresuming from step {start}"
        in failing.notices
    )


def test_an_error_of_the_data_is_recovered_from_too(pipeline):
    class Flaky(type(pipeline)):
        failures = 2  # what is read for several steps is tried again for each before it counts

        def split(self, step, count):
            if step > 20 and self.failures:
                self.failures -= 1
                raise lost("ABORTED")
            return super().split(step, count)

    flaky = Flaky(pipeline.source, batch_size=8, seed=3)
    recovered = run([StopAtStep(60)], flaky)
    np.testing.assert_array_equal(
        recovered.state.params["w"], run([StopAtStep(60)], pipeline).state.params["w"]
    )
    assert flaky.failures == 0


def test_an_iterator_goes_on_where_it_stands_and_nothing_is_lost(pipeline, tmp_path):
    taken = []

    def stream():
        for step in range(60):
            taken.append(step)
            yield pipeline.batch(step)

    hooks = [CheckpointSaver(tmp_path, when=every(steps=10)), Failing(25)]
    with pytest.warns(
        UserWarning, match="resuming at step 20 with data that have no random access"
    ):
        loop = run(hooks, stream())
    assert loop.steps_taken == 60 - 5  # five steps were taken again, with other batches
    assert taken == list(range(60))


def test_an_iterator_that_fails_is_not_asked_again(pipeline):
    def stream():
        yield pipeline.batch(0)
        raise lost()

    with pytest.raises(jax.errors.JaxRuntimeError, match="connection lost"):
        run([], stream())


def test_a_recovered_run_counts_from_its_first_start(pipeline, tmp_path):
    loop = run(
        [CheckpointSaver(tmp_path, when=every(steps=10)), Failing(25), StopAtStep(30)], pipeline
    )
    assert (loop.start_step, loop.steps_taken) == (0, 30)


def test_every_hook_ends_once_even_if_one_of_them_meets_a_transient_error(pipeline):
    class Counting(Hook):
        def __init__(self, *errors):
            self.errors = list(errors)
            self.ends = 0

        def end(self, report):
            if self.errors:
                raise self.errors.pop()
            self.ends += 1

    hooks = [Counting(), Counting(lost()), Counting()]
    run([*hooks, StopAtStep(3)], pipeline)
    assert [hook.ends for hook in hooks] == [1, 1, 1]


def test_the_number_of_recoveries_without_progress_is_bounded(pipeline):
    failing = Failing(9, times=99)
    with pytest.raises(jax.errors.JaxRuntimeError, match="connection lost") as caught:
        run([failing], pipeline, recoveries=4)
    assert failing.left[9] == 99 - 5
    assert "4 recoveries did not get beyond step 9" in caught.value.__notes__[0]


def test_a_run_that_gets_further_each_time_may_recover_often(pipeline, tmp_path):
    failing = Failing(*range(3, 40, 4))
    saver = CheckpointSaver(tmp_path, when=every(steps=2))
    assert run([saver, failing, StopAtStep(40)], pipeline, recoveries=1).steps_taken == 40


@pytest.mark.parametrize("error", [lambda: lost("INTERNAL"), lambda: ValueError("UNAVAILABLE: no")])
def test_other_errors_are_not_retried(pipeline, error):
    failing = Failing(5, error=error)
    with pytest.raises(type(error())):
        run([failing], pipeline)
    assert not can_be_retried(error())
    assert failing.left[5] == 0


def test_what_was_written_of_steps_that_are_taken_again_is_written_once(pipeline, tmp_path):
    hooks = [
        SummarySaver(tmp_path, when=every(steps=5)),
        CheckpointSaver(tmp_path / "checkpoints", when=every(steps=10)),
        Failing(27),
        StopAtStep(40),
    ]
    run(hooks, pipeline)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(
        range(5, 41, 5)
    )


def test_a_negative_number_of_recoveries_is_refused(pipeline):
    with pytest.raises(ValueError, match="recoveries must be a whole number >= 0, got -1"):
        Loop(STEP, make_state, pipeline, recoveries=-1)


def test_a_state_that_is_not_ready_is_refused_with_the_reason(pipeline):
    def ready(state):
        return None if int(state.step) else "its vocabulary is not loaded"

    with pytest.raises(
        NotReadyError, match="the state of step 0 is not ready: its vocabulary is not loaded"
    ):
        run([], pipeline, scaffold=Scaffold(ready_fn=ready))


def test_init_fn_changes_a_new_state_only(pipeline, tmp_path):
    scaffold = Scaffold(
        init_fn=lambda state: state.replace(params={"w": jnp.ones(3), "b": jnp.ones(())})
    )
    saver = CheckpointSaver(tmp_path)
    first = run([saver, StopAtStep(5)], pipeline, scaffold=scaffold)
    assert not np.array_equal(
        first.state.params["w"], run([StopAtStep(5)], pipeline).state.params["w"]
    )
    again = run([CheckpointSaver(tmp_path), StopAtStep(5)], pipeline, scaffold=scaffold)
    np.testing.assert_array_equal(first.state.params["w"], again.state.params["w"])


class Restoring(StateSaver):
    """Finds a checkpoint when it is asked for the third time."""

    asked = 0

    def restore_state(self, like):
        self.asked += 1
        return like.replace(step=jnp.int32(7)) if self.asked == 3 else None


def test_who_is_not_the_chief_waits_for_its_checkpoint(pipeline):
    hook = Restoring()
    loop = run([hook, StopAtStep(9)], pipeline, scaffold=Scaffold(wait_secs=30, poll_secs=0.01))
    assert loop.start_step == 7
    assert hook.asked == 3


def test_waiting_for_the_chief_has_a_limit(pipeline):
    with pytest.raises(
        NotReadyError, match=r"no checkpoint .* appeared within 0.05 s; is the chief running"
    ):
        run([], pipeline, scaffold=Scaffold(wait_secs=0.05, poll_secs=0.01))
