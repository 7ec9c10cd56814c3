"""Hooks for diagnosis: a failed step, digests of every step, data that have changed."""

import json
import shlex
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ftrain.checkpoints import digest_leaves
from ftrain.data import Pipeline
from ftrain.paths import local_path
from ftrain.storage import retry, write_text
from ftrain.training import Hook, Report, every
from ftrain.training.crash import write_crash
from ftrain.training.loss import Batch
from ftrain.training.replay import PastStep

DATA_FILE = "data.json"  # in the directory of a run
Line = dict[str, Any]  # step, state: digest by leaf, batch: digest by leaf


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


class DigestLog(Hook):
    """Write one line per step: the digests of its batch and of every leaf of the state after it.

    It reads every state, so steps are taken one by one, slowly. After a restart it appends to the
    same file, so steps that were taken again appear twice.
    """

    when = every(steps=1)
    chief_only = True

    changes_batch = True  # it reads the batch of every step

    def __init__(self, path: str | Path):
        self.path = local_path(path)
        self._file: IO[str] | None = None
        self._batch: dict[str, str] = {}

    def begin(self, report: Report) -> None:
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_incomplete_line(self.path)
        self._file = open(self.path, "a")  # noqa: SIM115 - closed by close()
        self._write({"step": report.step, "begun": True, "state": digest_leaves(report.state)})

    def before_step(self, report: Report, batch: Batch) -> Mapping[str, Any] | None:
        self._batch = digest_leaves(batch)
        return None

    def after_step(self, report: Report) -> None:
        self._write(
            {"step": report.step, "batch": self._batch, "state": digest_leaves(report.state)}
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: Line) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def read_digest_log(path: Path, start: int = 0) -> tuple[list[Line], int]:
    """Return the complete lines from a position on, and the position after them."""
    if not path.exists():
        return [], start
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in complete.splitlines()], start + len(complete)


def first_difference(line: Line, expected: Line) -> str | None:
    """Return the leaf of the batch or the state that differs between two runs, or None."""
    for part in ("batch", "state"):
        here = line.get(part)
        there = expected.get(part)
        if here is None or there is None:
            continue
        names = [name for name in (*there, *here) if here.get(name) != there.get(name)]
        if names:
            return f"{part} leaf {names[0]}"
    return None


def _drop_incomplete_line(path: Path) -> None:
    """Remove the line that a killed process was writing."""
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: data.rfind(b"\n") + 1])


class DataFingerprint(Hook):
    """Write what the pipeline consists of to data.json; warn if a resumed run has another one.

    The run continues, but differs from an uninterrupted one.
    """

    chief_only = True

    def __init__(self, directory: str | Path, data: Pipeline):
        self._path = local_path(directory) / DATA_FILE
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
            write_text(self._path, json.dumps(now, indent=1) + "\n")


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
