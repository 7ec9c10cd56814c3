import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regression import init_params, loss_fn

from ftrain import Hook, TrainState, every, make_step, optimizers
from ftrain.cluster import make_mesh
from ftrain.hooks import StopAtStep
from ftrain.training import Loop, at
from ftrain.training.hook import GUARD, SAVE, StateSaver

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = optimizers.gradient_descent(0.1)
STEP = make_step(loss_fn, SGD)


def make_state() -> TrainState:
    return TrainState.create(init_params(), SGD)


class Recorder(Hook):
    """Writes down every call."""

    def __init__(self, when=None, name="A", events=None):
        self.when = when or every(steps=1)
        self.name = name
        self.events = [] if events is None else events

    def note(self, event, step):
        self.events.append((self.name, event, step))

    def begin(self, report):
        report.listen(published=self.receive)
        self.note("begin", report.step)

    def after_step(self, report):
        self.note("after", report.step)

    def receive(self, step, values):
        self.note("receive", values)

    def end(self, report):
        self.note("end", report.step)

    def close(self):
        self.note("close", None)


def drive(hooks, data, state=None, **options) -> Loop:
    with Loop(STEP, state or make_state(), data, hooks=hooks, **options) as loop:
        while not loop.should_stop():
            loop.advance()
    return loop


def test_hooks_are_called_in_order(pipeline):
    events = []
    hooks = [Recorder(every(steps=2), "A", events), Recorder(at(2, 3), "B", events), StopAtStep(3)]
    drive(hooks, pipeline)
    assert events == [
        ("A", "begin", 0),
        ("B", "begin", 0),
        ("A", "after", 2),
        ("B", "after", 2),
        ("B", "after", 3),
        ("A", "end", 3),
        ("B", "end", 3),
        ("B", "close", None),
        ("A", "close", None),
    ]


def test_hooks_with_a_lower_order_are_called_first_and_savers_last(pipeline):
    events = []
    hooks = [Recorder(at(1), name, events) for name in ("A", "B", "C", "D")]
    hooks[0].order = SAVE
    hooks[2].order = GUARD
    drive([*hooks, StopAtStep(1)], pipeline)
    assert [name for name, event, _ in events if event == "after"] == ["C", "B", "D", "A"]


def test_messages_of_hooks_that_begin_first_are_shown_by_those_that_begin_last(pipeline):
    shown = []

    class Early(Hook):
        def begin(self, report):
            report.notice("early")

    class Late(Hook):
        def begin(self, report):
            report.listen(notice=shown.append)

    drive([Early(), Late(), StopAtStep(1)], pipeline)
    assert shown == ["early"]


def test_an_unknown_option_is_refused_with_the_nearest_one(pipeline):
    with pytest.raises(TypeError, match="there is no option 'fused'; did you mean fuse"):
        Loop(STEP, make_state(), pipeline, fused=3)


def test_a_report_tells_the_metrics_of_its_own_step(pipeline):
    seen = {}

    class Reader(Hook):
        when = every(steps=3)

        def after_step(self, report):
            seen[report.step] = report.values() | {"state": int(report.state.step)}

    drive([Reader(), StopAtStep(9)], pipeline)
    state = make_state()
    losses = {}
    for step in range(9):
        state, metrics = jax.jit(STEP)(state, pipeline.batch(step))
        losses[step + 1] = float(metrics["loss"])
    assert {step: pytest.approx(values["loss"]) for step, values in seen.items()} == {
        k: losses[k] for k in (3, 6, 9)
    }
    assert [values["state"] for values in seen.values()] == [3, 6, 9]


def test_a_hook_that_needs_no_state_is_told_the_same_without_a_wait(pipeline):
    class Reader(Hook):
        when = every(steps=3)

        def __init__(self, needs_state):
            self.needs_state = needs_state
            self.seen = []

        def after_step(self, report):
            self.seen.append((report.step, report.values()))

    waiting, later = Reader(True), Reader(False)
    drive([waiting, StopAtStep(25)], pipeline)
    drive([later, StopAtStep(25)], pipeline)
    assert [step for step, _ in later.seen] == list(range(3, 25, 3))
    assert later.seen == waiting.seen


def test_a_state_that_is_gone_says_what_to_do(pipeline):
    class Careless(Hook):
        when = at(3)
        needs_state = False

        def after_step(self, report):
            assert report.state

    with pytest.raises(
        RuntimeError,
        match="the state of step 3 is no longer available; set needs_state = True",
    ):
        drive([Careless(), StopAtStep(20)], pipeline)


def test_watchers_see_every_step_in_order_and_before_any_hook_fires(pipeline):
    events = []

    class Watcher(Hook):
        def begin(self, report):
            report.listen(metrics=self.watch)

        def watch(self, metrics):
            assert np.isfinite(metrics.column("loss")).all()
            events.extend(("watch", step) for step in range(metrics.first, metrics.last + 1))

    class Firing(Hook):
        when = at(5, 20)

        def after_step(self, report):
            events.append(("after", report.step))

    drive([Firing(), Watcher(), StopAtStep(25)], pipeline)
    assert [step for kind, step in events if kind == "watch"] == list(range(1, 26))
    assert events.index(("watch", 5)) < events.index(("after", 5)) < events.index(("watch", 6))
    assert events.index(("watch", 20)) < events.index(("after", 20)) < events.index(("watch", 21))


def test_published_values_reach_all_hooks_once(pipeline):
    events = []
    seen = {}

    class Publisher(Hook):
        when = at(2)

        def after_step(self, report):
            report.publish({"speed": jnp.float32(7.0)})

    class Due(Recorder):
        def after_step(self, report):
            seen.update(report.values())

    drive(
        [Publisher(), Recorder(at(1), "idle", events), Due(at(2), "due", events), StopAtStep(3)],
        pipeline,
    )
    assert ("idle", "receive", {"speed": 7.0}) in events
    assert not any(name == "due" and event == "receive" for name, event, _ in events)
    assert seen["speed"] == 7.0
    assert "loss" in seen


def test_the_callers_state_stays_usable(pipeline):
    state = make_state()
    drive([StopAtStep(5)], pipeline, state)
    assert int(state.step) == 0
    assert float(jnp.sum(state.params["w"])) == 0.0


def test_the_end_of_the_data_ends_cleanly(pipeline):
    recorder = Recorder(every(steps=10))
    loop = drive([recorder], [pipeline.batch(step) for step in range(3)])
    assert loop.stop_reason == "the data ended"
    assert loop.steps_taken == 3
    assert ("A", "end", 3) in recorder.events


def test_an_exception_skips_end_but_closes_everything(pipeline):
    class Failing(Hook):
        when = at(2)

        def after_step(self, report):
            raise RuntimeError("hook failed")

    class BadClose(Hook):
        def close(self):
            raise OSError("close failed")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="hook failed") as caught:
        drive([recorder, Failing(), BadClose()], pipeline)
    assert "close failed" in caught.value.__notes__[0]
    kinds = [event for _, event, _ in recorder.events]
    assert "end" not in kinds
    assert kinds[-1] == "close"


def test_a_failure_to_close_is_raised_when_nothing_else_failed(pipeline):
    class BadClose(Hook):
        def close(self):
            raise OSError("close failed")

    recorder = Recorder()
    with pytest.raises(OSError, match="close failed"):
        drive([recorder, BadClose(), StopAtStep(1)], pipeline)
    assert recorder.events[-1] == ("A", "close", None)


def test_an_exception_in_begin_closes_everything(pipeline):
    class Failing(Hook):
        def begin(self, report):
            raise RuntimeError("begin failed")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="begin failed"):
        drive([recorder, Failing()], pipeline)
    assert recorder.events[-1] == ("A", "close", None)


def test_an_error_of_the_data_reaches_the_caller(pipeline):
    def broken():
        yield pipeline.batch(0)
        raise OSError("lost the disk")

    with pytest.raises(OSError, match="lost the disk"):
        drive([], broken())


def test_a_stop_asked_before_the_first_step(pipeline):
    class Stopper(Hook):
        def begin(self, report):
            report.stop("enough")

    recorder = Recorder()
    loop = drive([Stopper(), recorder], pipeline)
    assert loop.steps_taken == 0
    assert loop.stop_reason == "enough"
    assert ("A", "end", 0) in recorder.events


def test_a_stop_from_another_thread(pipeline):
    with Loop(STEP, make_state(), pipeline) as loop:
        thread = threading.Timer(0.05, loop.request_stop, ["timer"])
        thread.start()
        while not loop.should_stop():
            loop.step()
        thread.join()
    assert loop.stop_reason == "timer"
    assert loop.steps_taken == int(loop.state.step)


def test_a_saver_supplies_the_state_to_start_from(pipeline):
    class Restorer(StateSaver):
        def restore_state(self, like):
            return like.replace(step=jnp.int32(40))

    recorder = Recorder(at(42))
    loop = drive([Restorer(), recorder, StopAtStep(43)], pipeline)
    assert loop.start_step == 40
    assert loop.steps_taken == 43
    assert ("A", "after", 42) in recorder.events


def test_a_mesh_gives_the_same_numbers_and_steps(pipeline):
    one = drive([StopAtStep(30)], pipeline)
    four = drive([StopAtStep(30)], pipeline, mesh=make_mesh(4))
    np.testing.assert_allclose(one.state.params["w"], four.state.params["w"], rtol=1e-5)
    assert len(four.state.params["w"].sharding.device_set) == 4


def test_an_unknown_metric_names_those_there_are(pipeline):
    class Reader(Hook):
        when = at(1)

        def after_step(self, report):
            report.read("los")

    with pytest.raises(
        KeyError, match="no metric los; there are gradient_norm, largest_error, learning_rate, loss"
    ):
        drive([Reader()], pipeline)


def test_metrics_keep_their_names_when_shapes_change(pipeline):
    def loss(params, batch, rng):
        value, _ = loss_fn(params, batch, rng)
        return value, {"eight" if len(batch["x"]) == 8 else "four": jnp.float32(len(batch["x"]))}

    seen = []

    class Reader(Hook):
        when = every(steps=1)

        def after_step(self, report):
            seen.append(
                {
                    name: value
                    for name, value in report.values().items()
                    if name in ("eight", "four")
                }
            )

    whole = pipeline.batch(0)
    half = {name: array[:4] for name, array in whole.items()}

    def train():
        with Loop(
            make_step(loss, SGD), make_state(), [whole, half, whole], hooks=[Reader()]
        ) as loop:
            while not loop.should_stop():
                loop.advance()

    with pytest.warns(
        UserWarning, match=r"batch of step 2 .* x is float32\[4, 3\], it was float32\[8, 3\]"
    ):
        train()
    assert seen == [{"eight": 8.0}, {"four": 4.0}, {"eight": 8.0}]


def test_a_step_outside_of_the_loop_says_so(pipeline):
    with pytest.raises(RuntimeError, match=r"not entered: use `with Loop\(\.\.\.\) as run:`"):
        Loop(STEP, make_state(), pipeline).step()


def test_a_step_after_a_hook_has_stopped_the_run_is_refused(pipeline):
    with Loop(STEP, make_state(), pipeline, hooks=[StopAtStep(3)]) as loop:
        for _ in range(3):
            loop.step()
        with pytest.raises(
            RuntimeError, match="the run has been stopped: step 3 was the last one asked for"
        ):
            loop.step()


def test_a_loop_is_entered_once(pipeline):
    loop = drive([StopAtStep(2)], pipeline)
    with (
        pytest.raises(RuntimeError, match="this Loop was already entered; create a new one"),
        loop,
    ):
        pass


def test_timed_triggers_fire_by_the_clock(pipeline):
    recorder = Recorder(every(secs=1e-9))
    drive([recorder, StopAtStep(4)], pipeline)
    assert [step for _, event, step in recorder.events if event == "after"] == [1, 2, 3, 4]


def test_a_hook_that_is_a_class_is_refused(pipeline):
    with pytest.raises(TypeError, match="hooks must be instances of"):
        Loop(STEP, make_state(), pipeline, hooks=[Hook])


def test_resuming_with_a_plain_iterable_is_said(pipeline):
    state = make_state().replace(step=jnp.int32(5))
    with pytest.warns(UserWarning, match="resuming at step 5 with data that have no random access"):
        drive([], [pipeline.batch(0)], state)


def test_a_value_that_cannot_be_published_is_named(pipeline):
    class Publisher(Hook):
        when = at(1)

        def after_step(self, report):
            report.publish({"vector": jnp.zeros(3)})

    with pytest.raises(TypeError, match="vector must be a number or a string to be published"):
        drive([Publisher()], pipeline)
