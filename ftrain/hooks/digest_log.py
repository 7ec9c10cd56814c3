"""The digest log: digests of the batch and the state of every step, to compare two runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ftrain.checkpoints import digest_leaves
from ftrain.paths import local_path
from ftrain.training import Hook, Report, every
from ftrain.training.loss import Batch

Line = dict[str, Any]  # step, state: digest by leaf, batch: digest by leaf


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
        self._file = open(self.path, "a")  # noqa: SIM115 - close() closes it
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
    """The complete lines from a position on, and the position after them."""
    if not path.exists():
        return [], start
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in complete.splitlines()], start + len(complete)


def first_difference(line: Line, expected: Line) -> str | None:
    """The leaf of the batch or the state that differs between two runs, or None."""
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
