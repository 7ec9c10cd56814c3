"""Hooks that tell a person how the run is going."""

import os
import sys
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ftrain.training import Hook, Report, Trigger, every
from ftrain.training.hook import Value


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:  # Ctrl-C also ended the `tee` that was listening: go on, there is a state to save
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Logging(Hook):
    """Write a line with every metric when it is time and at the end, and one for what other hooks publish."""

    needs_state = False

    def __init__(self, *, when: Trigger = every(steps=100), write: Callable[[str], None] = _print):
        self.when, self.write = when, write
        self._logged = 0  # the step of the newest line

    def begin(self, report: Report) -> None:
        self._logged = report.step
        if report.step:
            self.write(f"resumed at step {report.step}")

    def after_step(self, report: Report) -> None:
        self.receive(report.step, report.values())
        self._logged = report.step

    def receive(self, step: int, values: Mapping[str, Value]) -> None:
        self.write(f"step {step}: {format_values(values)}")

    def end(self, report: Report) -> None:
        values = report.published if self._logged == report.step else report.values()
        if values:
            self.receive(report.step, values)


class ProgressBar(Hook):
    """A bar with step, loss, learning rate, speed and time left, and a line above it for what other hooks publish."""

    needs_state = False

    def __init__(self, steps: int | None, console: Console, *, when: Trigger = every(secs=0.2)):
        self.when = when
        columns = (TextColumn("step"), _Steps(), BarColumn(), TextColumn("{task.fields[shown]}"))
        self._progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task("train", total=steps, shown="compiling ...")
        self._started: tuple[int, float] | None = None

    def begin(self, report: Report) -> None:
        if report.step:
            self._progress.console.print(f"resumed at step {report.step}")
        self._progress.update(self._task, completed=report.step)
        self._progress.start()

    def after_step(self, report: Report) -> None:
        step, moment = self._started = self._started or (report.step, report.time)
        speed = (report.step - step) / (report.time - moment) if report.time > moment else 0.0
        values = {"loss": report.read("loss"), "lr": report.read("learning_rate"), "steps/s": speed}
        self._progress.update(self._task, completed=report.step, shown=format_values(values))

    def receive(self, step: int, values: Mapping[str, Value]) -> None:
        kept = {name: value for name, value in values.items() if name != "steps_per_second"}
        if kept:
            self._progress.console.print(f"step {step}: {format_values(kept)}", markup=False, highlight=False)

    def end(self, report: Report) -> None:
        if report.values():
            self.after_step(report)
            self.receive(report.step, report.published)

    def close(self) -> None:
        self._progress.stop()


class _Steps(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{int(task.completed)}" + (f"/{int(task.total)}" if task.total is not None else ""))


def format_values(values: Mapping[str, Value]) -> str:
    """Numbers on one line, each text on lines of its own below.

    >>> format_values({"loss": 0.123456, "steps": 1000.0, "sample": "def f():"})
    'loss 0.1235, steps 1000\\n  sample: def f():'
    """
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if name not in texts)
    return numbers + "".join(f"\n  {name}: " + text.replace("\n", "\n    ") for name, text in texts.items())
