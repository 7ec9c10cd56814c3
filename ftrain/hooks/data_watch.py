"""What a run is trained on, noted in its directory, so that going on with something else is told."""

import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftrain.data import Pipeline
from ftrain.paths import local_path
from ftrain.storage import retry, write_text
from ftrain.training import Hook, Report

NOTE = "data.json"


class DataWatch(Hook):
    """Write what the pipeline is made of to data.json; warn if a run that is resumed has another one.

    It goes on then, but is no longer the run that it would have been.
    """

    chief_only = True

    def __init__(self, directory: str | Path, data: Pipeline):
        self._path, self._data = local_path(directory) / NOTE, data

    def begin(self, report: Report) -> None:
        now = self._data.summary()
        before = _read(self._path) if report.step else {}
        changed = [
            f"{name} was {before[name]}, now {value}"
            for name, value in now.items()
            if name in before and before[name] != value
        ]
        if changed:
            warnings.warn(
                f"this run goes on at step {report.step} with other data than it began with: {'; '.join(changed)}",
                stacklevel=2,
            )
        with suppress(OSError):  # a run does not fail for want of a note
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps(now, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(retry(path.read_bytes))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(
            f"{path} cannot be read, so the data cannot be compared with it: {error}", stacklevel=2
        )
        return {}
    return found if isinstance(found, dict) else {}
