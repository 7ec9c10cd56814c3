"""The hook that keeps a failed step."""

import json
import shlex
from pathlib import Path

from ftrain.paths import local_path
from ftrain.training import Hook, Report
from ftrain.training.crash import write_crash
from ftrain.training.replay import PastStep


class CrashBundle(Hook):
    """When a step fails, or a NaN is found, write `directory`/crash/<step>, to take the step again.

    It has the state before the step, computed from the newest checkpoint or the start in at most a
    minute; the batch and what it consists of; the rng, the error message and the versions.
    `ftrain replay` takes the step again.
    """

    chief_only = True

    def __init__(self, directory: str | Path):
        self.directory = local_path(directory)

    def begin(self, report: Report) -> None:
        report.listen(failure=self._keep)

    def _keep(self, error: Exception, past: PastStep | None) -> None:
        if past is None:
            return
        crash = write_crash(self.directory, error, past)
        has_config = (self.directory / "config.toml").exists()
        place = str(self.directory)
        in_python = f"ftrain.training.read_crash({json.dumps(place)})"
        way = f"ftrain replay {shlex.quote(place)}" if has_config else in_python
        error.add_note(f"kept in {crash.directory}; to take the step again: {way}")
