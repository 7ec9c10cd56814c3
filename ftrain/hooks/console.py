"""Hooks that show the progress of a run: log lines, a log file, a progress bar."""

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ftrain.hooks.summary import Speed
from ftrain.paths import local_path
from ftrain.training import Hook, Report, Trigger, every
from ftrain.training.hook import WRITE, Value

SHOWN = 3  # metrics in a progress bar, if none of them is the loss


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except (
        BrokenPipeError
    ):  # Ctrl-C also ended the `tee` that was reading, but there is a state to save
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Logging(Hook):
    """Write a line with the metrics at the steps that `when` chooses, and at the end of the run.

    TensorFlow 1 writes the last line twice if its step is due. Published values get a line too.
    `metrics` are the names to show, all of them if it is None; `format` makes the text of a line.
    """

    needs_state = False
    chief_only = True
    order = WRITE

    def __init__(
        self,
        metrics: Sequence[str] | None = None,
        *,
        when: Trigger = every(steps=100),
        at_end: bool = True,
        write: Callable[[str], None] = _print,
        format: Callable[[Mapping[str, Value]], str] | None = None,
    ):
        self.metrics = metrics
        self.when = when
        self.at_end = at_end
        self.write = write
        self.format = format or format_values
        self._logged = 0  # the step of the newest line
        self._has_checked = False  # whether the step has all names

    def begin(self, report: Report) -> None:
        report.listen(published=self._write_values, notice=self.show)
        self._logged = report.step
        if report.step:
            self.write(f"resumed at step {report.step}")

    def after_step(self, report: Report) -> None:
        values = report.values()
        if not self._has_checked:  # names may be misspelt
            self._has_checked = True
            missing = [name for name in self.metrics or () if name not in values]
            if missing:
                report.notice(
                    f"cannot log {', '.join(missing)} at step {report.step}; there are "
                    f"{', '.join(values)}"
                )
        self._write_values(report.step, values)
        self._logged = report.step

    def _write_values(self, step: int, values: Mapping[str, Value]) -> None:
        if self.metrics is not None:
            values = {name: values[name] for name in self.metrics if name in values}
        if values:
            self.write(f"step {step}: {self.format(values)}")

    def show(self, text: str) -> None:
        """Write a message to the user."""
        self.write(text)

    def end(self, report: Report) -> None:
        if self.at_end and self._logged != report.step:  # what was published is written
            self._write_values(
                report.step, {k: v for k, v in report.values().items() if k not in report.published}
            )


class LogFile(Logging):
    """Append the lines of `Logging` to a file, for the processes of a job other than the first."""

    chief_only = False

    def __init__(self, path: str | Path, *, when: Trigger = every(steps=100)):
        super().__init__(when=when, write=self._append)
        self.path = local_path(path)

    def _append(self, line: str) -> None:
        with suppress(OSError), self._open() as file:  # a missing log is no reason to fail
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def _open(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return open(self.path, "a", encoding="utf-8")


class ProgressBar(Hook):
    """A bar with step, loss, learning rate, speed and time left; published values above it.

    A step without a loss shows its first metrics instead.
    """

    needs_state = False
    chief_only = True
    order = WRITE

    def __init__(
        self,
        steps: int | None = None,
        console: Console | None = None,
        *,
        when: Trigger = every(secs=0.2),
    ):
        self.when = when
        columns = (TextColumn("step"), _Steps(), BarColumn(), TextColumn("{task.fields[shown]}"))
        self._progress = Progress(
            *columns, TextColumn("left"), TimeRemainingColumn(), console=console
        )
        self._task = self._progress.add_task("train", total=steps, shown="compiling ...")
        self._speed = Speed()
        self._begun = 0  # the step that the run started from

    def begin(self, report: Report) -> None:
        report.listen(published=self._show_values, notice=self.show)
        self._speed.clear()
        self._begun = report.step
        if report.step:
            self._progress.console.print(f"resumed at step {report.step}")
        self._progress.update(self._task, completed=report.step)
        self._progress.start()

    def after_step(self, report: Report) -> None:
        values = _shown(report.values()) | {
            "steps/s": self._speed.measure(report.step, report.time) or 0.0
        }
        self._progress.update(self._task, completed=report.step, shown=format_values(values))

    def _show_values(self, step: int, values: Mapping[str, Value]) -> None:
        kept = {name: value for name, value in values.items() if not name.endswith("_per_second")}
        if kept:
            self.show(f"step {step}: {format_values(kept)}")

    def show(self, text: str) -> None:
        """Write a message above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def end(self, report: Report) -> None:
        if report.step > self._begun:
            self.after_step(report)

    def close(self) -> None:
        self._progress.stop()


class _Steps(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(
            f"{int(task.completed)}" + (f"/{int(task.total)}" if task.total is not None else "")
        )


def _shown(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values in a bar: the loss or else the first metrics, and any learning rate."""
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    rate = numbers.pop("learning_rate", math.nan)
    first = (
        {"loss": numbers["loss"]}
        if "loss" in numbers
        else dict(itertools.islice(numbers.items(), SHOWN))
    )
    return {**first} if math.isnan(rate) else {**first, "lr": rate}


def format_values(values: Mapping[str, Value]) -> str:
    """Format numbers on one line, and each string on its own lines below.

    >>> format_values({"loss": 0.123456, "steps": 1000.0, "sample": "def f():"})
    'loss 0.1235, steps 1000\\n  sample: def f():'
    """
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    numbers = ", ".join(
        _format(name, value) for name, value in values.items() if not isinstance(value, str)
    )
    return numbers + "".join(
        f"\n  {name}: " + text.replace("\n", "\n    ") for name, text in texts.items()
    )


def _format(name: str, value: float) -> str:
    """Format a number with its name; a large speed with a prefix."""
    if name.endswith("_per_second"):
        for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= max(size, 1e4):
                return f"{name} {value / size:.4g}{prefix}"
    return f"{name} {value:.4g}"
