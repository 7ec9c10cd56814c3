"""Speed is measured between steps that finish, however they are dispatched."""

import io
import re

import pytest
from regression import init_params, loss_fn
from rich.console import Console

from ftrain import TrainState, make_step, optimizers
from ftrain.hooks import Logging, ProgressBar, StepCounter, StopAtStep
from ftrain.training import Hook, Loop, StepMetrics, every

pytestmark = pytest.mark.usefixtures("no_thread_left")
SGD = optimizers.gradient_descent(0.1)
RATE = 1000.0  # steps per second of the device


class Device:
    """A device that is always busy, and its clock, which moves only when the loop waits for a step.

    So the calls that are dispatched between two waits are dispatched at one moment.
    """

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(StepMetrics, "wait", lambda metrics: self.advance(metrics.last / RATE))
        monkeypatch.setattr(
            StepMetrics, "is_ready", lambda metrics: metrics.last / RATE <= self.now
        )

    def advance(self, moment):
        self.now = max(self.now, moment)


class Receiver(Hook):
    def __init__(self):
        self.speeds = []

    def begin(self, report):
        report.listen(published=self.receive)

    def receive(self, step, values):
        self.speeds.append((step, values["steps_per_second"]))


def drive(hooks, data, device, fuse):
    state = TrainState.create(init_params(), SGD)
    with Loop(
        make_step(loss_fn, SGD), state, data, hooks=hooks, fuse=fuse, clock=lambda: device.now
    ) as loop:
        while not loop.should_stop():
            loop.advance()


@pytest.mark.parametrize("fuse", [1, 10, 25])
@pytest.mark.parametrize("every_steps", [50, 500])
def test_adjacent_lines_are_equal_if_the_device_is_steady(pipeline, monkeypatch, fuse, every_steps):
    """In windows that are shorter than what is measured over, and in longer ones."""
    receiver = Receiver()
    counter = StepCounter(when=every(steps=every_steps))
    drive([counter, receiver, StopAtStep(2000)], pipeline, Device(monkeypatch), fuse)
    assert [step for step, _ in receiver.speeds] == list(range(every_steps, 2001, every_steps))
    assert [speed for _, speed in receiver.speeds] == pytest.approx([RATE] * len(receiver.speeds))


@pytest.mark.parametrize("fuse", [1, 10])
def test_the_bar_shows_the_same_speed(pipeline, monkeypatch, fuse):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160)
    bar = ProgressBar(500, console, when=every(steps=50))
    drive([bar, StopAtStep(500)], pipeline, Device(monkeypatch), fuse)
    assert {float(speed) for speed in re.findall(r"steps/s (\d[\d.e+]*)", text.getvalue())} <= {
        0.0,
        RATE,
    }


def test_a_short_window_reaches_back(pipeline):
    """Two steps that the loop sees finish at one moment do not make a speed of their own."""
    moments = iter([0.0, 0.1, 0.2, 0.3, 0.3, 0.5, 1.0])

    class Now:
        now = 0.0

    class Ticking(Hook):
        when = every(steps=1)
        changes_batch = True

        def before_step(self, report, batch):
            Now.now = next(moments)

    receiver = Receiver()
    drive([Ticking(), StepCounter(when=every(steps=1)), receiver, StopAtStep(7)], pipeline, Now, 1)
    expected = [(2, 10.0), (3, 10.0), (4, 10.0), (5, 4 / 0.3), (6, 3 / 0.3), (7, 1 / 0.5)]
    assert receiver.speeds == [(step, pytest.approx(speed)) for step, speed in expected]


def test_speed_stands_in_the_lines_of_a_log(pipeline):
    lines = []
    hooks = [
        StepCounter(when=every(steps=10)),
        Logging(when=every(steps=10), write=lines.append),
        StopAtStep(30),
    ]
    state = TrainState.create(init_params(), SGD)
    with Loop(make_step(loss_fn, SGD), state, pipeline, hooks=hooks) as loop:
        while not loop.should_stop():
            loop.advance()
    assert all("steps_per_second" in line for line in lines)
