"""Ctrl-C in the middle of anything: what was learned is saved, or at least still at hand."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import start_process
from regression import init_params, loss_fn

import ftrain
from ftrain.checkpoints import CheckpointManager, open_reader
from ftrain.hooks import CheckpointSaver, Logging, SummarySaver
from ftrain.training import Hook, at

pytestmark = pytest.mark.usefixtures("no_thread_left")
MOMENTUM = ftrain.optimizers.momentum(0.05, 0.9)


def run_of(pipeline, *hooks, step=None, **options):
    state = ftrain.TrainState.create(init_params(), MOMENTUM)
    hooks = [Logging(write=lambda line: None), *hooks]
    return ftrain.Run(
        step or ftrain.make_step(loss_fn, MOMENTUM), state, pipeline, hooks=hooks, **options
    )


def interrupted(run, between=lambda run: None):
    with pytest.raises(KeyboardInterrupt) as caught:
        take_all(run, between)
    return caught.value


def take_all(run, between):
    with run:
        while not run.should_stop():
            between(run)
            run.step()


def saved(directory) -> tuple[int | None, np.ndarray]:
    return CheckpointManager(directory).latest(), open_reader(directory).read("params/w")


class Interrupt(Hook):
    """Sends the signal of Ctrl-C, or raises what it raises, at step 7."""

    when = at(7)

    def __init__(self, how, needs_state=False):
        self.how = how
        self.needs_state = needs_state

    def after_step(self, report):
        self.how()


def send():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # a handler of Python's runs between two operations
        pass


def raise_it():
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", [send, raise_it])
@pytest.mark.parametrize("needs_state", [False, True], ids=["steps in flight", "settled"])
def test_an_interrupt_in_a_hook_saves_the_newest_step(pipeline, tmp_path, how, needs_state):
    run = run_of(pipeline, Interrupt(how, needs_state), directory=tmp_path)
    error = interrupted(run)
    assert run.steps_taken >= 7
    step, weights = saved(tmp_path)
    assert step == run.steps_taken == int(run.state.step)
    np.testing.assert_array_equal(weights, run.state.params["w"])
    assert error.__notes__ == [f"the state after step {step} is saved"]


@pytest.mark.parametrize("how", [send, raise_it])
def test_an_interrupt_between_two_steps_saves(pipeline, tmp_path, how):
    run = run_of(pipeline, directory=tmp_path)
    interrupted(run, between=lambda run: how() if run.steps_taken == 9 else None)
    assert saved(tmp_path)[0] == 9


def test_the_run_goes_on_from_there_as_if_nothing_had_been(pipeline, tmp_path):
    whole = run_of(pipeline, steps=20)
    with whole:
        while not whole.should_stop():
            whole.advance()
    interrupted(run_of(pipeline, Interrupt(send), directory=tmp_path, steps=20))
    resumed = run_of(pipeline, directory=tmp_path, steps=20)
    with resumed:
        assert resumed.start_step >= 7
        while not resumed.should_stop():
            resumed.advance()
    np.testing.assert_array_equal(resumed.state.params["w"], whole.state.params["w"])


def test_a_signal_while_a_step_is_dispatched_loses_nothing(pipeline, tmp_path):
    """It arrives in the compiled call, which has overwritten the state: the likeliest moment."""
    compiled = ftrain.make_step(loss_fn, MOMENTUM)

    def step(state, batch):
        new, metrics = compiled(state, batch)
        jax.debug.callback(lambda number: send() if number == 5 else None, new.step, ordered=True)
        return new, metrics

    run = run_of(pipeline, step=step, directory=tmp_path, fuse=1)
    interrupted(run)
    step_saved, weights = saved(tmp_path)
    assert step_saved == run.steps_taken >= 5
    np.testing.assert_array_equal(weights, run.state.params["w"])


def test_an_interrupt_inside_of_the_call_loses_nothing_either(pipeline, tmp_path, monkeypatch):
    """It arrives after the call has returned, and before its result is used."""
    run = run_of(pipeline, directory=tmp_path, fuse=1)
    call = type(run._compiled).__call__

    def with_signal(program, state, piece, first):
        made = call(program, state, piece, first)
        if first == 4:
            send()
        return made

    monkeypatch.setattr(type(run._compiled), "__call__", with_signal)
    interrupted(run)
    assert saved(tmp_path)[0] == run.steps_taken == 4


def test_a_state_that_is_lost_is_told_and_the_checkpoint_stays(pipeline, tmp_path, monkeypatch):
    saver = CheckpointSaver(tmp_path / "checkpoints", when=ftrain.every(steps=2))
    run = run_of(pipeline, saver, directory=tmp_path, fuse=1)
    call = type(run._compiled).__call__

    def raising(program, state, piece, first):
        made = call(program, state, piece, first)
        if first == 4:
            raise KeyboardInterrupt  # not by the signal, which is delayed
        return made

    monkeypatch.setattr(type(run._compiled), "__call__", raising)
    error = interrupted(run)
    assert re.search(
        "the state after step 3 is lost: .* the newest checkpoint, .* is as it was",
        error.__notes__[0],
    )
    assert saved(tmp_path)[0] == 2


def test_without_a_directory_the_state_is_still_at_hand(pipeline):
    run = run_of(pipeline, Interrupt(send))
    error = interrupted(run)
    assert int(run.state.step) == run.steps_taken >= 7
    assert np.isfinite(run.state.params["w"]).all()
    assert "is not saved" in error.__notes__[0]


def test_what_was_measured_before_is_written(pipeline, tmp_path):
    run = run_of(
        pipeline,
        Interrupt(send),
        SummarySaver(tmp_path, when=ftrain.every(steps=1)),
        directory=tmp_path,
    )
    interrupted(run)
    lines = ftrain.summaries.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [
        *range(1, 7)
    ]  # those before the one that was interrupted


def test_a_state_that_cannot_be_saved_is_told_and_the_interrupt_goes_on(pipeline, tmp_path):
    run = run_of(pipeline, Interrupt(send), directory=tmp_path)

    def spoil(run):
        if run.steps_taken == 6:
            (tmp_path / "checkpoints").rename(tmp_path / "moved")
            (tmp_path / "checkpoints").write_text("a file")

    error = interrupted(run, between=spoil)
    assert re.search("the state after step .* could not be saved: ", error.__notes__[0])


def test_the_handler_of_the_program_is_put_back(pipeline):
    before = signal.getsignal(signal.SIGINT)
    interrupted(run_of(pipeline, Interrupt(send)))
    assert signal.getsignal(signal.SIGINT) is before is signal.default_int_handler


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import ftrain
from regression import init_params, loss_fn, make_arrays
optimizer = ftrain.optimizers.momentum(0.05, 0.9)
data = ftrain.data.Pipeline(ftrain.data.ArraySource(make_arrays()), batch_size=8, seed=3)
hooks = [ftrain.hooks.Logging(when=ftrain.every(steps=500))]
options = {"directory": sys.argv[3] or None, "hooks": hooks}
if sys.argv[2] == "train":
    ftrain.train(loss_fn, init_params(), data, optimizer=optimizer, **options)
state = ftrain.TrainState.create(init_params(), optimizer)
try:
    with ftrain.Run(ftrain.make_step(loss_fn, optimizer), state, data, **options) as run:
        while not run.should_stop():
            run.advance()
except KeyboardInterrupt:
    print(f"state of step {int(run.state.step)}", flush=True)
    raise
"""


def ctrl_c(*arguments) -> subprocess.CompletedProcess:
    """A real process, and a real Ctrl-C once it has logged a line."""
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}
    environ["PYTHONFAULTHANDLER"] = "1"
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1]), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start_process(command, env=environ, **pipes) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler shows where it hangs
            _, err = process.communicate()
            pytest.fail(f"it did not end:\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, first + out, err)


def test_ctrl_c_of_a_real_program_saves_and_ends_as_interrupted(tmp_path):
    ended = ctrl_c("run", tmp_path)
    assert ended.returncode == -signal.SIGINT
    number = re.search(r"state of step (\d+)", ended.stdout)
    assert number is not None, ended.stderr
    assert saved(tmp_path)[0] == int(number[1]) > 0


@pytest.mark.parametrize(
    ("has_directory", "told"), [(True, "saving and stopping"), (False, "nothing is saved")]
)
def test_train_says_what_is_true(tmp_path, has_directory, told):
    ended = ctrl_c("train", tmp_path if has_directory else "")
    assert f"SIGINT: {told}" in ended.stderr.replace("stopping; nothing", "nothing")
    assert ("saving" in ended.stderr) == has_directory
    assert re.search(r"KeyboardInterrupt: stopped after step \d+, (not )?saved", ended.stderr)
