"""The evaluation at the end of a run reaches every hook, and the metrics of the last checkpoint."""

import pytest
from regression import init_params, loss_fn

from ftrain import Hook, TrainState, every, make_step, optimizers
from ftrain.checkpoints import CheckpointManager
from ftrain.hooks import CheckpointSaver, Evaluator, FinalOps, Logging, StopAtStep, SummarySaver
from ftrain.summaries import read_metrics
from ftrain.training import Loop, at

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = optimizers.gradient_descent(0.1)


def drive(hooks, data, *, interrupt=False, logging=None):
    state = TrainState.create(init_params(), SGD)
    logging = logging or Logging(when=every(steps=1000), write=lambda line: None)
    with Loop(make_step(loss_fn, SGD), state, data, hooks=[*hooks, logging]) as loop:
        while not loop.should_stop():
            loop.advance()
        if interrupt:
            loop.interrupt("SIGTERM")
    return loop


def evaluator(*scores, when=None) -> Evaluator:
    left = iter(scores)
    return Evaluator(lambda params: {"score": next(left)}, when=when or every(steps=10))


def saver(directory, when) -> CheckpointSaver:
    return CheckpointSaver(
        directory, when=when, keep=1, keep_best=1, best_metric="eval/score", best_mode="max"
    )


class Receiving(Hook):
    """A hook that has no `end`."""

    when = every(steps=10)

    def __init__(self):
        self.seen = []

    def begin(self, report):
        report.listen(published=self.receive)

    def after_step(self, report):
        self.receive(report.step, report.values())

    def receive(self, step, values):
        if "eval/score" in values:
            self.seen.append((step, values["eval/score"]))


class Ending(Receiving):
    """A hook that has an `end` which has nothing to do with it."""

    def end(self, report):
        self.ended = True


@pytest.mark.parametrize("kind", [Receiving, Ending])
@pytest.mark.parametrize("is_first", [True, False])
def test_it_is_delivered_to_every_hook_once(pipeline, kind, is_first):
    hook = kind()
    evaluate = evaluator(0.1, 0.2, 0.3)
    drive([*((hook, evaluate) if is_first else (evaluate, hook)), StopAtStep(25)], pipeline)
    assert hook.seen == [(10, 0.1), (20, 0.2), (25, 0.3)]


@pytest.mark.parametrize("is_saver_first", [True, False])
@pytest.mark.parametrize(
    "when", [every(steps=25), every(steps=5), every(steps=1000)], ids=["last", "due", "not due"]
)
def test_the_last_checkpoint_has_it_and_can_be_the_best(pipeline, tmp_path, when, is_saver_first):
    save = saver(tmp_path, when)
    evaluate = evaluator(0.1, 0.2, 0.9)
    drive([*((save, evaluate) if is_saver_first else (evaluate, save)), StopAtStep(25)], pipeline)
    manager = CheckpointManager(tmp_path, keep_best=1, best_metric="eval/score", best_mode="max")
    assert manager.checkpoints()[-1].metrics["eval/score"] == 0.9
    assert "loss" in manager.checkpoints()[-1].metrics
    assert manager.best() == 25
    assert manager.steps() == [25]


def test_a_last_evaluation_that_was_due_is_in_a_last_checkpoint_that_was_not(pipeline, tmp_path):
    drive([evaluator(0.1, 0.9), saver(tmp_path, every(steps=1000)), StopAtStep(20)], pipeline)
    assert CheckpointManager(tmp_path).checkpoints()[-1].metrics["eval/score"] == 0.9


@pytest.mark.parametrize("is_saver_first", [True, False])
def test_an_evaluation_of_a_step_that_is_saved_is_in_its_metrics(
    pipeline, tmp_path, is_saver_first
):
    """Whichever of the two hooks comes first."""
    save = saver(tmp_path, every(steps=10))
    evaluate = evaluator(0.9, 0.2)
    drive([*((save, evaluate) if is_saver_first else (evaluate, save)), StopAtStep(20)], pipeline)
    assert save.manager.best() == 10
    assert save.manager.steps() == [10, 20]


def test_final_values_of_other_hooks_are_there_too(pipeline, tmp_path):
    drive([FinalOps(lambda state: {"size": 3.0}), saver(tmp_path, at(5)), StopAtStep(5)], pipeline)
    assert CheckpointManager(tmp_path).checkpoints()[-1].metrics["size"] == 3.0


def test_it_is_logged_and_written_once(pipeline, tmp_path):
    for last in (20, 25):
        lines = []
        directory = tmp_path / str(last)
        hooks = [
            evaluator(0.25, 0.5, when=at(7)),
            SummarySaver(directory, when=every(steps=10)),
            StopAtStep(last),
        ]
        drive(hooks, pipeline, logging=Logging(when=every(steps=10), write=lines.append))
        assert len([line for line in lines if "eval/score 0.5" in line]) == 1
        assert len([line for line in lines if line.startswith(f"step {last}: loss")]) == 1
        written = [
            line for line in read_metrics(directory / "metrics.jsonl") if line["step"] == last
        ]
        assert [line["eval/score"] for line in written if "eval/score" in line] == [0.5]
        assert len([line for line in written if "loss" in line]) == 1


def test_a_run_that_was_interrupted_at_its_last_step_is_evaluated_when_it_is_started_again(
    pipeline, tmp_path
):
    drive([evaluator(0.1), saver(tmp_path, at(15)), StopAtStep(15)], pipeline, interrupt=True)
    assert "eval/score" not in CheckpointManager(tmp_path).checkpoints()[-1].metrics
    again = drive([evaluator(0.7), saver(tmp_path, at(15)), StopAtStep(15)], pipeline)
    assert again.start_step == again.steps_taken == 15
    assert CheckpointManager(tmp_path).checkpoints()[-1].metrics["eval/score"] == 0.7
    drive([evaluator(), saver(tmp_path, at(15)), StopAtStep(15)], pipeline)  # and not once more


def test_the_last_step_is_saved_before_it_is_evaluated(pipeline, tmp_path):
    """A process that is killed during a long evaluation loses nothing; restarted, it evaluates."""

    def evaluate(params):
        save.manager.wait()
        assert save.manager.steps() == [15]
        raise KeyboardInterrupt  # what no other hook is told of, as if the process were killed

    save = saver(tmp_path, every(steps=1000))
    with pytest.raises(KeyboardInterrupt):
        drive([Evaluator(evaluate, when=every(steps=1000)), save, StopAtStep(15)], pipeline)
    again = drive(
        [
            evaluator(0.7, when=every(steps=1000)),
            saver(tmp_path, every(steps=1000)),
            StopAtStep(15),
        ],
        pipeline,
    )
    assert again.start_step == again.steps_taken == 15
    assert CheckpointManager(tmp_path).checkpoints()[-1].metrics["eval/score"] == 0.7


def test_a_best_metric_that_comes_at_the_end_is_not_reported_as_missing(pipeline, tmp_path):
    lines = []
    logging = Logging(when=every(steps=1000), write=lines.append)
    drive(
        [evaluator(0.7, when=at(1000)), saver(tmp_path, at(1000)), StopAtStep(15)],
        pipeline,
        logging=logging,
    )
    assert not [line for line in lines if "best_metric" in line]
