"""The hook that writes what a run measures to files."""

from collections.abc import Mapping
from pathlib import Path

from ftrain.summaries import MetricsFile, SummaryWriter
from ftrain.training import Hook, Report, Trigger, every
from ftrain.training.hook import Value


class SummarySaver(Hook):
    """Write metrics, and all that other hooks publish, to an event file for TensorBoard and to `metrics.jsonl`."""

    needs_state = False

    def __init__(self, directory: str | Path, *, when: Trigger = every(steps=100)):
        self.directory, self.when = Path(directory), when
        self._writers: list[SummaryWriter | MetricsFile] = []
        self._written = 0  # the newest step whose metrics were written

    def begin(self, report: Report) -> None:
        metrics = MetricsFile(self.directory / "metrics.jsonl", start_step=report.step)
        self._written = report.step
        self._writers = [metrics, SummaryWriter(self.directory, start_step=report.step)]

    def after_step(self, report: Report) -> None:
        self.receive(report.step, report.values())
        self._written = report.step

    def receive(self, step: int, values: Mapping[str, Value]) -> None:
        for writer in self._writers:
            writer.write(step, values)

    def end(self, report: Report) -> None:
        values = report.published if self._written == report.step else report.values()
        if values:
            self.receive(report.step, values)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
