"""A process that follows another: it waits for its checkpoints, restores them, writes none."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest
from regression import init_params, loss_fn

import ftrain
from ftrain.checkpoints import CheckpointManager, checkpoints_iterator, wait_for_checkpoint
from ftrain.hooks import CheckpointSaver, Logging, StopAtStep, WaitForStep
from ftrain.training import Loop, Scaffold, every
from ftrain.training.hook import StateSaver

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = ftrain.optimizers.gradient_descent(0.1)
STEP = ftrain.make_step(loss_fn, SGD)


def make_state():
    return ftrain.TrainState.create(init_params(), SGD)


def take(loop, steps=None):
    with loop:
        while not loop.should_stop() and loop.steps_taken != steps:
            loop.step()
    return loop


def chief(pipeline, directory, *hooks, **options):
    saver = CheckpointSaver(directory / "checkpoints", when=every(steps=5))
    hooks = [saver, Logging(write=lambda line: None), *hooks]
    return ftrain.Run(STEP, make_state(), pipeline, directory=directory, hooks=hooks, **options)


@pytest.mark.parametrize("kind", ["loop", "run"])
def test_it_restores_while_the_chief_is_running_and_saves_nothing(pipeline, tmp_path, kind):
    lines = []
    waiting = Scaffold(wait_secs=60)
    log = Logging(write=lines.append)
    with chief(pipeline, tmp_path) as running:
        while running.steps_taken < 7:
            running.step()
        CheckpointManager(tmp_path).latest()
        if kind == "loop":
            hooks = [
                CheckpointSaver(tmp_path / "checkpoints", when=every(steps=1)),
                log,
                StopAtStep(9),
            ]
            follower = Loop(STEP, make_state(), pipeline, hooks=hooks, scaffold=waiting)
        else:
            follower = ftrain.Run(
                STEP,
                make_state(),
                pipeline,
                directory=tmp_path,
                hooks=[log],
                scaffold=waiting,
                steps=9,
            )
        before = sorted(path.name for path in tmp_path.iterdir())
        take(follower)
        assert follower.start_step == 5
        assert follower.steps_taken == 9
        assert CheckpointManager(tmp_path).steps() == [5]
        assert (
            sorted(path.name for path in tmp_path.iterdir()) == before
        )  # nor does it write anything else there
        assert any("this process saves no checkpoints" in line for line in lines)
        running.request_stop()
    assert CheckpointManager(tmp_path).steps() == [5, 7]


class Asked(StateSaver):
    """Knows that a run has begun to look for a checkpoint."""

    def __init__(self):
        self.event = threading.Event()

    def restore_state(self, like):
        self.event.set()


def test_the_chief_may_start_after_those_who_wait_for_it(pipeline, tmp_path):
    asked = Asked()
    ended = []

    def follow():
        hooks = [CheckpointSaver(tmp_path / "checkpoints"), asked, StopAtStep(8)]
        scaffold = Scaffold(wait_secs=120, poll_secs=0.01)
        ended.append(take(Loop(STEP, make_state(), pipeline, hooks=hooks, scaffold=scaffold)))

    thread = threading.Thread(target=follow)
    thread.start()
    assert asked.event.wait(60)
    take(chief(pipeline, tmp_path, steps=5))
    thread.join()
    assert ended[0].start_step == 5


def test_without_waiting_a_second_saver_is_refused(pipeline, tmp_path):
    with chief(pipeline, tmp_path) as running:
        running.step()
        with pytest.raises(ftrain.checkpoints.InUseError, match="is in use by process"):
            take(chief(pipeline, tmp_path))
        running.request_stop()


def test_a_saver_whose_lock_was_taken_saves_no_more(pipeline, tmp_path):
    with pytest.raises(
        ftrain.checkpoints.InUseError,
        match=r"saver\.lock was deleted, and another process has taken it",
    ):
        take_while_the_lock_is_stolen(pipeline, tmp_path)
    assert CheckpointManager(tmp_path).latest() is None


def take_while_the_lock_is_stolen(pipeline, directory):
    lock = directory / "checkpoints" / "saver.lock"
    with chief(pipeline, directory) as running:
        running.step()
        lock.unlink()
        with ftrain.checkpoints.hold(lock, "it is held"):
            while running.steps_taken < 5:
                running.step()


def evaluate(params):
    return {"w": float(jnp.sum(params["w"]))}


def test_a_run_directory_is_evaluated_like_the_directory_of_its_checkpoints(pipeline, tmp_path):
    take(chief(pipeline, tmp_path, steps=5))
    found = [
        list(ftrain.evaluate_checkpoints(path, evaluate, make_state(), last_step=5, timeout=60))
        for path in (tmp_path, tmp_path / "checkpoints")
    ]
    assert found[0] == found[1]
    assert [step for step, _ in found[0]] == [5]


def test_a_run_directory_that_appears_later_is_evaluated(pipeline, tmp_path):
    directory = tmp_path / "later"
    looked = threading.Event()

    def stop():
        looked.set()
        return False

    def follow():
        evaluated = ftrain.evaluate_checkpoints(
            directory, evaluate, make_state(), last_step=5, timeout=120, stop=stop
        )
        steps.extend(step for step, _ in evaluated)

    steps = []
    thread = threading.Thread(target=follow)
    thread.start()
    assert looked.wait(60)
    take(chief(pipeline, directory, steps=5))
    thread.join()
    assert steps[-1] == 5


def test_all_that_follows_takes_a_run_directory(pipeline, tmp_path):
    manager = CheckpointManager(tmp_path)  # before it is one
    state = take(chief(pipeline, tmp_path, steps=5)).state
    assert manager.latest() == manager.best() == wait_for_checkpoint(tmp_path, timeout=0) == 5
    assert list(checkpoints_iterator(tmp_path, timeout=0)) == [5]
    np.testing.assert_array_equal(manager.restore(like=make_state()).params["w"], state.params["w"])
    hooks = [WaitForStep(5, tmp_path, timeout=0), StopAtStep(1)]
    assert take(Loop(STEP, make_state(), pipeline, hooks=hooks)).steps_taken == 1


def test_a_manager_stays_where_it_has_saved(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": jnp.ones(3)})
    (tmp_path / "checkpoints").mkdir()
    manager.save(2, {"w": jnp.ones(3)})
    assert CheckpointManager(tmp_path).steps() == manager.steps() == [1, 2]
