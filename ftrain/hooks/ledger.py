"""The ledger: digests of everything that a run is, step by step, so that two runs can be compared."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ftrain.checkpoints import digest_leaves
from ftrain.paths import local_path
from ftrain.training import Hook, Report, every
from ftrain.training.loss import Batch

Line = dict[str, Any]  # step, state: digest by leaf, batch: digest by leaf


class Ledger(Hook):
    """Write one line for each step: the digests of its batch, and of every leaf of the state after it.

    It looks at every state, so steps are taken one by one, and takes its time; it is there to prove something. After a
    restart it goes on in the same file, so that steps that were taken again stand there twice.
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
        _drop_half_a_line(self.path)
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


def read_ledger(path: Path, start: int = 0) -> tuple[list[Line], int]:
    """The lines that are complete from a position on, and the position after them."""
    if not path.exists():
        return [], start
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in complete.splitlines()], start + len(complete)


def first_difference(line: Line, wanted: Line) -> str | None:
    """What of a step is not as it was in the other run: the leaf of its batch or of its state."""
    for part in ("batch", "state"):
        found, expected = line.get(part), wanted.get(part)
        if found is None or expected is None:
            continue
        names = [name for name in (*expected, *found) if found.get(name) != expected.get(name)]
        if names:
            return f"{part} leaf {names[0]}"
    return None


def _drop_half_a_line(path: Path) -> None:
    """What a killed process was writing."""
    if path.exists():
        data = path.read_bytes()
        path.write_bytes(data[: data.rfind(b"\n") + 1])
