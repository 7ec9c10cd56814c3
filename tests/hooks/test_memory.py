"""Hook states are in the checkpoint: an interrupted run stops where it would have stopped."""

import json
import math

import jax
import pytest
from regression import init_params, loss_fn

from ftrain import Hook, TrainState, every, make_step, optimizers
from ftrain.checkpoints import CheckpointError, CheckpointManager, verify
from ftrain.hooks import CheckpointSaver, Evaluator, Logging, StopAtStep, StopWhen
from ftrain.training import Loop, at

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = optimizers.gradient_descent(0.1)
STEP = make_step(loss_fn, SGD)


class Publishing(Hook):
    """Publishes a score, which gets better up to step 10 only, every ten steps."""

    when = every(steps=10)

    def after_step(self, report):
        report.publish({"score": max(0.0, 10.0 - report.step)})


class Counting(Hook):
    """Remembers every step that it saw, and everything that was published."""

    def __init__(self, needs=True):
        self.steps = []
        self.received = []
        self.needs_state = needs

    def begin(self, report):
        report.listen(metrics=self.watch, published=self.receive)

    def watch(self, metrics):
        self.steps += range(metrics.first, metrics.last + 1)

    def receive(self, step, values):
        self.received.append([step, values["score"]] if "score" in values else [step])

    def state(self):
        return {"steps": self.steps, "received": self.received, "never": math.inf}

    def restore(self, state):
        assert state["never"] == math.inf
        self.steps, self.received = list(state["steps"]), list(state["received"])


class Interrupting(Hook):
    def __init__(self, step):
        self.when = at(step)
        self.loop = None

    def after_step(self, report):
        self.loop.interrupt("SIGTERM")


class Failing(Hook):
    """A device that is lost once, at a step."""

    def __init__(self, step):
        self.when = at(step)
        self.left = 1

    def after_step(self, report):
        if self.left:
            self.left -= 1
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection lost")


def drive(hooks, data, *, fuse=1, lines=None):
    written = [] if lines is None else lines
    logging = Logging(when=every(steps=1000), write=written.append)
    with Loop(
        STEP,
        lambda: TrainState.create(init_params(), SGD),
        data,
        hooks=[*hooks, logging],
        fuse=fuse,
    ) as loop:
        for hook in hooks:
            if isinstance(hook, Interrupting):
                hook.loop = loop
        while not loop.should_stop():
            loop.advance()
    return loop


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


def saver(directory, when=None) -> CheckpointSaver:
    return CheckpointSaver(directory, when=when or every(steps=1000), keep=9)


@pytest.mark.parametrize("fuse", [1, 5])
@pytest.mark.parametrize("interrupted", [35, 40, 59, 60])
@pytest.mark.parametrize("is_saver_first", [True, False])
def test_an_interrupted_run_stops_where_it_would_have_stopped(
    pipeline, directory, fuse, interrupted, is_saver_first
):
    def train(*others):
        hooks = [Publishing(), StopWhen("score", patience=5), StopAtStep(200), *others]
        hooks = [saver(directory), *hooks] if is_saver_first else [*hooks, saver(directory)]
        return drive(hooks, pipeline, fuse=fuse)

    assert train(Interrupting(interrupted)).steps_taken == interrupted
    assert train().steps_taken == 60


def test_the_step_where_it_stops_is_the_one_without_a_checkpoint(pipeline):
    assert (
        drive([Publishing(), StopWhen("score", patience=5), StopAtStep(200)], pipeline).steps_taken
        == 60
    )


@pytest.mark.parametrize(
    "options", [{"patience": 5}, {"threshold": 0.0}, {"threshold": 0.0, "mode": "min"}]
)
def test_a_run_that_was_stopped_takes_no_further_step(pipeline, directory, options):
    first = drive(
        [Publishing(), StopWhen("score", **options), StopAtStep(200), saver(directory)], pipeline
    )
    lines = []
    again = drive(
        [Publishing(), StopWhen("score", **options), StopAtStep(200), saver(directory)],
        pipeline,
        lines=lines,
    )
    assert again.steps_taken == again.start_step == first.steps_taken < 200
    assert again.stop_reason == first.stop_reason
    assert [line for line in lines if line.startswith("stopping: ")] == [
        f"stopping: {first.stop_reason}"
    ]


def test_more_patience_lets_it_go_on(pipeline, directory):
    def train(patience):
        return drive(
            [Publishing(), StopWhen("score", patience=patience), StopAtStep(200), saver(directory)],
            pipeline,
        )

    assert train(5).steps_taken == 60
    assert train(7).steps_taken == 80
    assert train(7).steps_taken == 80


def test_another_threshold_lets_it_go_on(pipeline, directory):
    class Falling(Hook):
        when = every(steps=10)

        def after_step(self, report):
            report.publish({"score": 100.0 - report.step})

    def train(threshold):
        return drive(
            [Falling(), StopWhen("score", threshold=threshold), saver(directory)], pipeline
        )

    assert train(70.0).steps_taken == 30
    assert train(50.0).steps_taken == 50


def test_each_hook_gets_its_own(pipeline, directory):
    """Two on different metrics, two on one metric, and two that have no label: by their order."""

    def hooks():
        first, second = Counting(), Counting(needs=False)
        return [
            StopWhen("missing", patience=1),
            StopWhen("score", patience=50),
            StopWhen("score", patience=50, mode="max"),
            StopWhen("score", threshold=-1.0),
            first,
            second,
        ]

    one = hooks()
    one[4].steps.append("first")
    drive([Publishing(), *one, StopAtStep(20), saver(directory)], pipeline)
    saved = CheckpointManager(directory).extra(20)["hooks"]
    names = [
        "StopWhen(score, min)",
        "StopWhen(score, max)",
        "StopWhen(score, min)#2",
        "Counting",
        "Counting#2",
    ]
    assert list(saved) == sorted(names)  # the manifest is sorted
    other = hooks()
    drive([Publishing(), *other, StopAtStep(21), saver(directory)], pipeline)
    assert other[4].steps == ["first", *range(1, 22)]
    assert other[5].steps == [*range(1, 22)]
    assert [hook.state() for hook in other[:4]] == [hook.state() for hook in one[:4]]


@pytest.mark.parametrize("fuse", [1, 5])
@pytest.mark.parametrize("needs", [True, False])
def test_what_watch_and_receive_saw_is_that_of_the_saved_step(pipeline, directory, fuse, needs):
    drive(
        [saver(directory, every(steps=10)), Counting(needs), Publishing(), StopAtStep(35)],
        pipeline,
        fuse=fuse,
    )
    for step in (10, 20, 30, 35):
        state = CheckpointManager(directory).extra(step)["hooks"]["Counting"]
        assert state["steps"] == [*range(1, step + 1)]
        assert [each[0] for each in state["received"]] == [*range(10, step + 1, 10)]


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("fuse", [1, 5])
def test_memories_go_back_when_a_run_recovers(pipeline, directory, saves, fuse):
    counting = Counting()
    hooks = [Publishing(), counting, StopWhen("score", patience=5), Failing(33), StopAtStep(200)]
    loop = drive(
        [*hooks, *([saver(directory, every(steps=20))] if saves else [])], pipeline, fuse=fuse
    )
    assert loop.steps_taken == 60
    assert counting.steps == [*range(1, 61)]
    assert [each[0] for each in counting.received] == [*range(10, 61, 10)]


def test_they_are_those_of_the_checkpoint_that_was_restored(pipeline, directory):
    drive([Counting(), StopAtStep(20), saver(directory, every(steps=10))], pipeline)
    (directory / "20" / "manifest.json").write_text("{}")
    counting = Counting()
    with pytest.warns(UserWarning, match="20 is damaged"):
        drive([counting, StopAtStep(12), saver(directory)], pipeline)
    assert counting.steps == [*range(1, 13)]


def test_a_new_hook_starts_fresh_and_one_that_is_gone_is_ignored(pipeline, directory):
    drive([Publishing(), StopWhen("score", patience=9), StopAtStep(20), saver(directory)], pipeline)
    counting = Counting()
    lines = []
    drive([counting, StopAtStep(25), saver(directory)], pipeline, lines=lines)
    assert counting.steps == [*range(21, 26)]
    told = "the checkpoint has the state of hooks that this run does not have: StopWhen(score, min)"
    assert [line for line in lines if "state of hooks" in line] == [told]


def test_a_checkpoint_of_before_there_were_memories_is_resumed(pipeline, directory):
    """Its manifest has no such field."""
    state = TrainState.create(init_params(), SGD)
    CheckpointManager(directory).save(
        30, state.replace(step=state.step + 30), metrics={"loss": 1.0}
    )
    text = (directory / "30" / "manifest.json").read_text()
    assert "extra" not in json.loads(text)["manifest"]
    loop = drive(
        [Publishing(), StopWhen("score", patience=5), StopAtStep(200), saver(directory)], pipeline
    )
    assert (loop.start_step, loop.steps_taken) == (30, 90)
    assert (directory / "30" / "manifest.json").read_text() == text
    assert verify(directory / "30") == []


def test_a_hook_that_is_used_again_in_another_run_starts_fresh(pipeline):
    stop = StopWhen("score", patience=5)
    for _ in range(2):
        assert drive([Publishing(), stop, StopAtStep(200)], pipeline).steps_taken == 60


def test_infinities_and_nan_are_strict_json_on_disk(pipeline, directory):
    class Broken(Hook):
        when = every(steps=10)

        def after_step(self, report):
            report.publish({"score": math.nan})

    def forbid(constant):
        raise AssertionError(constant)

    def train(last):
        stop = StopWhen("score", patience=5)
        drive([Broken(), stop, StopAtStep(last), saver(directory)], pipeline)
        return stop.state()

    state = train(10)
    assert state["best"] == math.inf
    json.loads((directory / "10" / "manifest.json").read_text(), parse_constant=forbid)
    assert train(20)["looks"] == 2


def test_a_memory_that_cannot_be_stored_names_its_hook(pipeline, directory):
    class Clumsy(Hook):
        def state(self):
            return {"array": object()}

    with pytest.raises(
        CheckpointError, match="extra/hooks/Clumsy/array is a object, which cannot be stored"
    ):
        drive([Clumsy(), StopAtStep(2), saver(directory)], pipeline)

    class Wrong(Hook):
        def state(self):
            return [1]

    with pytest.raises(
        TypeError, match=r"Wrong: state\(\) must return a mapping or None, got \[1\]"
    ):
        drive([Wrong(), StopAtStep(2)], pipeline)


def test_evaluations_go_on_counting(pipeline, directory):
    """Early stopping on published evaluations; the one at the end of the first part is ignored."""

    def train(last):
        evaluator = Evaluator(lambda params: {"score": 1.0}, when=every(steps=10))
        return drive(
            [evaluator, StopWhen("eval/score", patience=3), StopAtStep(last), saver(directory)],
            pipeline,
        )

    assert train(15).steps_taken == 15
    assert train(25).steps_taken == 25
    assert train(200).steps_taken == 40
    assert train(200).steps_taken == 40
