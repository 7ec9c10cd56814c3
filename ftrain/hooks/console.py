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

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ftrain.hooks.summary import Speed
from ftrain.paths import local_path
from ftrain.training import Hook, Report, StepMetrics, Trigger, every
from ftrain.training.hook import WRITE, Value
from ftrain.training.step_metrics import NAN_IF_UNKNOWN

SHOWN = 3  # metrics in a progress bar, if none of them is the loss
# Metrics whose last value says more than the mean over steps; `learning_rate/head` of a group too.
NOT_AVERAGED = frozenset({"learning_rate", "loss_scale", "updates_skipped"})
MAX_CALLS = 256  # whose metrics wait to be averaged


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except (
        BrokenPipeError
    ):  # Ctrl-C also ended the `tee` that was reading, but there is a state to save
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class IntervalMeans:
    """The means of metrics over the steps since the last look; for a hook that listens to metrics.

    Nothing is read before a look: the metrics of finished calls are only kept until then.
    """

    def __init__(self) -> None:
        self._calls: list[StepMetrics] = []
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._newest: dict[str, float] = {}  # of the last look

    def clear(self) -> None:
        """Forget all steps."""
        self._calls.clear()
        self._sums.clear()
        self._counts.clear()
        self._newest = {}

    def add(self, metrics: StepMetrics) -> None:
        """Add the steps of a finished call."""
        self._calls.append(metrics)
        if len(self._calls) >= MAX_CALLS:
            self._sum()

    def take(self) -> dict[str, float]:
        """Return the means of all steps since the last look, but not those of `NOT_AVERAGED`.

        Without a step since then, they are those of the last look.
        """
        self._sum()
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        means = means or self._newest
        self.clear()
        self._newest = means
        return means

    def _sum(self) -> None:
        by_names: dict[tuple[str, ...], list[np.ndarray]] = {}
        for call in self._calls:
            by_names.setdefault(call.names, []).append(call.table())
        self._calls.clear()
        for names, tables in by_names.items():
            table = np.concatenate(tables)
            for name, total in zip(names, table.sum(axis=0, dtype=np.float64), strict=True):
                if name.partition("/")[0] not in NOT_AVERAGED:
                    self._sums[name] = self._sums.get(name, 0.0) + float(total)
                    self._counts[name] = self._counts.get(name, 0) + len(table)


class Logging(Hook):
    """Write a line with the metrics at the steps that `when` chooses, and at the end of the run.

    Metrics are means over the steps since the last line, and the loss of the last step follows its
    mean: `loss 0.52 (last 0.48)`. What hooks publish is written as it is.

    TensorFlow 1 writes the last line twice if its step is due. Published values get a line too.

    Args:
      metrics: the names to show; all of them if it is None.
      format: makes the text of a line from the values.
      mean: False for the metrics of the last step, as metrics.jsonl has them.
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
        mean: bool = True,
    ):
        self.metrics = metrics
        self.when = when
        self.at_end = at_end
        self.write = write
        self.format = format
        self.mean = mean
        self._means = IntervalMeans()
        self._logged = 0  # the step of the newest line
        self._has_checked = False  # whether the step has all names

    def begin(self, report: Report) -> None:
        self._means.clear()
        report.listen(
            published=self._write_values,
            notice=self.show,
            metrics=self._means.add if self.mean else None,
        )
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
        self._write_values(report.step, values, self._means.take())
        self._logged = report.step

    def _write_values(
        self, step: int, values: Mapping[str, Value], means: Mapping[str, float] | None = None
    ) -> None:
        """Write the values, or their means where there are some."""
        if self.metrics is not None:
            values = {name: values[name] for name in self.metrics if name in values}
        unknown = [name for name in NAN_IF_UNKNOWN if values.get(name) != values.get(name)]
        values = {name: value for name, value in values.items() if name not in unknown}
        if not values:
            return
        averaged = {name: (means or {}).get(name, value) for name, value in values.items()}
        if self.format is not None:
            text = self.format(averaged)
        else:
            text = format_values(averaged, last={k: v for k, v in values.items() if k == "loss"})
        self.write(f"step {step}: {text}")

    def show(self, text: str) -> None:
        """Write a message to the user."""
        self.write(text)

    def end(self, report: Report) -> None:
        if self.at_end and self._logged != report.step:  # what was published is written
            own = {k: v for k, v in report.values().items() if k not in report.published}
            self._write_values(report.step, own, self._means.take())


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

    The loss is the mean over the steps since the bar was drawn last, or with mean=False that of the
    last step. A step without a loss shows its first metrics instead.
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
        mean: bool = True,
    ):
        self.when = when
        self.mean = mean
        self._means = IntervalMeans()
        columns = (TextColumn("step"), _Steps(), BarColumn(), TextColumn("{task.fields[shown]}"))
        self._progress = Progress(
            *columns, TextColumn("left"), TimeRemainingColumn(), console=console
        )
        self._task = self._progress.add_task("train", total=steps, shown="compiling ...")
        self._speed = Speed()
        self._begun = 0  # the step that the run started from

    def begin(self, report: Report) -> None:
        self._means.clear()
        report.listen(
            published=self._show_values,
            notice=self.show,
            metrics=self._means.add if self.mean else None,
        )
        self._speed.clear()
        self._begun = report.step
        if report.step:
            self._progress.console.print(f"resumed at step {report.step}")
        self._progress.update(self._task, completed=report.step)
        self._progress.start()

    def after_step(self, report: Report) -> None:
        values = _shown(report.values() | self._means.take()) | {
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


def format_values(values: Mapping[str, Value], last: Mapping[str, Value] | None = None) -> str:
    """Format numbers on one line, and each string on its own lines below.

    Where the value of the `last` step looks different, it follows in parentheses.

    >>> format_values({"loss": 0.123456, "steps": 1000.0, "sample": "def f():"})
    'loss 0.1235, steps 1000\\n  sample: def f():'
    """
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    numbers = ", ".join(
        _format(name, value) + _format_last(value, (last or {}).get(name, value))
        for name, value in values.items()
        if not isinstance(value, str)
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


def _format_last(mean: float, last: Value) -> str:
    if isinstance(last, str) or f"{mean:.4g}" == f"{last:.4g}":
        return ""
    return f" (last {last:.4g})"
