"""metrics.jsonl: one line of JSON for everything a run measured, for scripts and notebooks."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftrain.paths import local_path
from ftrain.summaries.values import plain_step, plain_value


class MetricsFile:
    """Appends lines `{"step": 100, "time": ..., "loss": ...}` to a file.

    `start_step` is the step the run starts from: lines of later steps, from a run that was interrupted, are dropped,
    because those steps are taken again. A last line that was cut off is dropped too.
    """

    def __init__(self, path: str | Path, *, start_step: int = 0):
        self.path = local_path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _rewind(self.path, start_step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        plain = {name: _as_json(plain_value(name, value)) for name, value in values.items()}
        line = {"step": plain_step(step), "time": round(time.time(), 3)} | plain
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, oldest first; a last line that is still being written is left out."""
    lines = local_path(path).read_text(encoding="utf-8").splitlines()
    return [line for line in map(_parse, lines) if line is not None]


def _rewind(path: Path, start_step: int) -> None:
    kept = [line for line in read_metrics(path) if line.get("step", math.inf) <= start_step]
    beside = path.with_name(path.name + ".new")
    beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(beside, path)


def _as_json(value: float | str) -> float | str:
    # JSON has no word for these; as strings, float() still reads them.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(line)
    except json.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None
