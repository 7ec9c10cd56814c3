"""Hooks that tell a person how the run is going."""

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

from ftrain.hooks.counting import Speed
from ftrain.paths import local_path
from ftrain.training import Hook, Report, Trigger, every
from ftrain.training.hook import WRITE, Value

SHOWN = 3  # metrics in a progress bar, if none of them is the loss


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except (
        BrokenPipeError
    ):  # Ctrl-C also ended the `tee` that was listening: go on, there is a state to save
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Logging(Hook):
    """Write a line with the metrics when it is time and, unless that has just been done, at the end.

    The reference writes the last line twice if its step is due. What other hooks publish gets a line too. `metrics` are
    the names to show, all of them if it is None; `format` makes the text of a line.
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
        self.metrics, self.when, self.at_end, self.write = metrics, when, at_end, write
        self.format = format or format_values
        self._logged = 0  # the step of the newest line
        self._looked = False  # whether all names were looked for

    def begin(self, report: Report) -> None:
        report.listen(published=self._write_values, notice=self.show)
        self._logged = report.step
        if report.step:
            self.write(f"resumed at step {report.step}")

    def after_step(self, report: Report) -> None:
        values = report.values()
        if not self._looked:  # for names that are misspelt
            self._looked = True
            missing = [name for name in self.metrics or () if name not in values]
            if missing:
                report.notice(
                    f"to be logged, and not there yet: {', '.join(missing)}; there are {', '.join(values)}"
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
    """Write the lines of `Logging` to the end of a file: for the processes of a job that do not write for all."""

    chief_only = False

    def __init__(self, path: str | Path, *, when: Trigger = every(steps=100)):
        super().__init__(when=when, write=self._append)
        self.path = local_path(path)

    def _append(self, line: str) -> None:
        with suppress(OSError), self._open() as file:  # a run does not fail for want of a log
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def _open(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return open(self.path, "a", encoding="utf-8")


class ProgressBar(Hook):
    """A bar with step, loss, learning rate, speed and time left; above it a line for what other hooks publish.

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
    """What a bar has room for: the loss, or else the first metrics, and the learning rate if it is known."""
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    rate = numbers.pop("learning_rate", math.nan)
    first = (
        {"loss": numbers["loss"]}
        if "loss" in numbers
        else dict(itertools.islice(numbers.items(), SHOWN))
    )
    return {**first} if math.isnan(rate) else {**first, "lr": rate}


def format_values(values: Mapping[str, Value]) -> str:
    """Numbers on one line, each text on lines of its own below.

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
    """A number with its name; a speed with a prefix, because it may have many digits."""
    if name.endswith("_per_second"):
        for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= max(size, 1e4):
                return f"{name} {value / size:.4g}{prefix}"
    return f"{name} {value:.4g}"
