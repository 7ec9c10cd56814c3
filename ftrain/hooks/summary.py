"""The hook that writes metrics to event files and metrics.jsonl."""

from collections.abc import Mapping
from pathlib import Path

from ftrain.paths import local_path
from ftrain.summaries import BackgroundWriter, MetricsFile, SummaryWriter
from ftrain.training import Hook, Report, Trigger, every
from ftrain.training.hook import WRITE, Value


class SummarySaver(Hook):
    """Write metrics and published values to an event file for TensorBoard and to `metrics.jsonl`.

    A thread writes; before a checkpoint is saved the run waits for pending writes. The last step is
    always written, at the end of the run; TensorFlow 1 does not do that.
    """

    needs_state = False
    chief_only = True
    order = WRITE

    def __init__(self, directory: str | Path, *, when: Trigger = every(steps=100)):
        self.directory = local_path(directory)
        self.when = when
        self._writer: BackgroundWriter | None = None
        self._written = 0  # the newest step whose metrics were written

    def begin(self, report: Report) -> None:
        report.listen(published=self._write, flush=self._flush)
        self.close()
        metrics = MetricsFile(self.directory / "metrics.jsonl", start_step=report.step)
        self._written = report.step
        events = SummaryWriter(self.directory, start_step=report.step)
        self._writer = BackgroundWriter([metrics, events], report.coordinator)

    def after_step(self, report: Report) -> None:
        self._write(report.step, report.values())
        self._written = report.step

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._writer is not None:
            self._writer.write(step, values)

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def end(self, report: Report) -> None:
        if self._written != report.step:
            own = {
                name: value
                for name, value in report.values().items()
                if name not in report.published
            }
            if own:  # what was published is written
                self._write(report.step, own)
        self._flush()

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
