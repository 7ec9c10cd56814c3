"""The hook that warns if a run resumes with other data than it started with."""

import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftrain.data import Pipeline
from ftrain.formats.whole_files import write_whole
from ftrain.paths import local_path
from ftrain.storage import retry
from ftrain.training import Hook, Report

FILE = "data.json"


class DataFingerprint(Hook):
    """Write what the pipeline consists of to data.json; warn if a resumed run has another one.

    The run continues, but differs from an uninterrupted one.
    """

    chief_only = True

    def __init__(self, directory: str | Path, data: Pipeline):
        self._path = local_path(directory) / FILE
        self._data = data

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
                f"this run resumes at step {report.step} with other data than it started with: "
                f"{'; '.join(changed)}",
                stacklevel=2,
            )
        with suppress(OSError):  # a missing fingerprint is no reason to fail
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(now, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(retry(path.read_bytes))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(
            f"{path} cannot be read, so the data cannot be compared with it: {error}",
            stacklevel=2,
        )
        return {}
    return found if isinstance(found, dict) else {}
