"""The catalog of a directory: which checkpoints there are, which is the latest, and which stay.

`checkpoints.json` lists the checkpoints in the order in which they were saved. `rotate` decides
which of them stay; it is pure. What renames and deletes directories is in `cleanup`.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from ftrain.checkpoints.array_values import crc32c_of_text
from ftrain.checkpoints.errors import DamagedError
from ftrain.checkpoints.lock import wait_for_lock
from ftrain.checkpoints.manifest import check_time, read_manifest
from ftrain.checkpoints.orbax_layout import COMMITTED
from ftrain.storage import exists, is_directory, is_file, list_names, read_whole, write_text

CATALOG_FILE = "checkpoints.json"
REPLACED = (
    ".replaced"  # suffix of an old checkpoint while a new one of the same step takes its place
)
NEWEST = "newest"  # among the newest
KEPT = "kept"  # for good: due by step or by time, or not written by ftrain
PASSED = "passed"  # neither; stays only while it is pinned or among the best
_LOCK = ".catalog.lock"  # held while the catalog is changed; a file, because NFS locks no directory
_MAX_BYTES = 1 << 28
_MAX_STEP_DIGITS = 18


@dataclasses.dataclass(frozen=True)
class Record:
    """A checkpoint as the catalog lists it."""

    step: int
    time: float
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    role: Literal["newest", "kept", "passed"] = NEWEST
    pinned: bool = False


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `keep`, one every n steps or hours, and the `best`."""

    keep: int | Literal["all"] = 3
    every_steps: int | None = None
    every_hours: float | None = None
    best: int = 0
    metric: str = "loss"
    mode: Literal["min", "max"] | None = None  # None: the smallest loss

    def __post_init__(self):
        if self.keep != "all" and (not isinstance(self.keep, int) or self.keep < 1):
            raise ValueError(f"keep must be a whole number >= 1, or 'all', got {self.keep!r}")
        if self.every_steps is not None and (
            not isinstance(self.every_steps, int) or self.every_steps < 1
        ):
            raise ValueError(
                f"keep_every_steps must be a whole number >= 1, got {self.every_steps!r}"
            )
        if self.every_hours is not None and not self.every_hours > 0:
            raise ValueError(f"keep_every_hours must be > 0, got {self.every_hours}")
        if not isinstance(self.best, int) or self.best < 0:
            raise ValueError(f"keep_best must be >= 0, got {self.best!r}")
        if not isinstance(self.metric, str):
            raise ValueError(f"best_metric must be a name, got {self.metric!r}")
        if self.mode not in ("min", "max", None):
            raise ValueError(f"best_mode must be 'min' or 'max', got {self.mode!r}")
        if self.best and self.mode is None and self.metric != "loss":
            raise ValueError(
                f"keep_best by {self.metric!r} needs best_mode, 'min' or 'max': which values are better?"
            )


@dataclasses.dataclass(frozen=True)
class Catalog:
    """The checkpoints of a directory in the order of their saves; the last is the latest."""

    records: tuple[Record, ...] = ()
    keep_after: float | None = None  # a checkpoint saved after this time is kept for good
    retention: Retention = dataclasses.field(default_factory=Retention)  # applied last

    def find(self, step: int) -> Record | None:
        """Return the record of a step, or None."""
        return next((record for record in self.records if record.step == step), None)

    def replace(self, step: int, **changes: Any) -> "Catalog":
        """Return a copy with changed fields in the record of a step."""
        changed = (
            dataclasses.replace(record, **changes) if record.step == step else record
            for record in self.records
        )
        return dataclasses.replace(self, records=tuple(changed))

    def without(self, step: int) -> "Catalog":
        """Return a copy that does not list a step."""
        others = tuple(record for record in self.records if record.step != step)
        return dataclasses.replace(self, records=others)

    def write(self, directory: Path) -> None:
        """Write the catalog's file, atomically."""
        contents = {
            "latest": self.records[-1].step if self.records else None,
            "keep_after": self.keep_after,
            "retention": dataclasses.asdict(self.retention),
            "checkpoints": [dataclasses.asdict(record) for record in self.records],
        }
        contents["crc32c"] = _checksum(contents)
        write_text(directory / CATALOG_FILE, json.dumps(contents, indent=1) + "\n")


def rotate(
    records: Sequence[Record], policy: Retention, keep_after: float
) -> tuple[list[Record], list[Record], float]:
    """Return the checkpoints that stay, those to delete, and the new value of `keep_after`.

    `records` are in the order in which they were saved. One that leaves the newest is kept for good
    if its step is a multiple of `every_steps`, or if it was saved after `keep_after`, which then
    advances by `every_hours`.
    """
    rotated = list(records)
    window = [n for n, record in enumerate(records) if record.role == NEWEST]
    expired = [] if policy.keep == "all" else window[: max(0, len(window) - policy.keep)]
    for n in expired:
        record = records[n]
        role = KEPT if policy.every_steps and record.step % policy.every_steps == 0 else PASSED
        if policy.every_hours and record.time > keep_after:
            role = KEPT
            keep_after = max(keep_after + policy.every_hours * 3600, record.time)
        rotated[n] = dataclasses.replace(record, role=role)
    recent = rotated if policy.keep == "all" else rotated[-policy.keep :]
    safe = {record.step for record in [*recent, *best_of(rotated, policy, policy.best)]}

    def stays(record: Record) -> bool:
        return record.role != PASSED or record.pinned or record.step in safe

    kept = [record for record in rotated if stays(record)]
    deleted = [record for record in rotated if not stays(record)]
    return kept, deleted, keep_after


def best_of(records: Sequence[Record], policy: Retention, count: int) -> list[Record]:
    """Return the `count` best by the metric, best first; of equals, the newer first."""
    sign = -1 if policy.mode == "max" else 1
    measured = [
        record
        for record in reversed(records)
        if math.isfinite(record.metrics.get(policy.metric, math.nan))
    ]
    return sorted(measured, key=lambda record: sign * record.metrics[policy.metric])[:count]


def numbered_steps(directory: Path) -> list[int]:
    """Return the steps that have a directory, complete or not, in ascending order."""
    steps: set[int] = set()
    for name in list_names(directory):
        step = name.removesuffix(REPLACED)
        if _is_step(step) and is_directory(directory / name):
            steps.add(int(step))
    return sorted(steps)


def committed_steps(directory: Path) -> list[int]:
    """Return the steps whose checkpoints are complete, in ascending order."""
    steps = numbered_steps(directory)
    return [step for step in steps if exists(step_path(directory, step) / COMMITTED)]


def step_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is; while it is replaced, the old one has a suffix."""
    path = directory / str(step)
    replaced = path.with_name(f"{step}{REPLACED}")
    return replaced if exists(replaced) and not exists(path) else path


def read_catalog(directory: Path, steps: Sequence[int] | None = None) -> Catalog:
    """Read the catalog and make it agree with the disk: drop missing steps, add unlisted ones.

    A step is missing from an existing list if the process that saved it was killed before it
    updated the list. If there is no readable list, nothing is known about the checkpoints, so all
    of them are kept for good, as are those that plain Orbax wrote.
    """
    steps = committed_steps(directory) if steps is None else steps
    listed = _read(directory / CATALOG_FILE)
    records = [record for record in listed.records if record.step in steps] if listed else []
    unlisted = sorted(set(steps) - {record.step for record in records})
    for step in unlisted:
        record = _discover(step_path(directory, step), step, has_catalog=listed is not None)
        records += [] if record is None else [record]
    in_order = tuple(sorted(records, key=lambda record: record.time))
    return dataclasses.replace(listed or Catalog(), records=in_order)


@contextmanager
def lock_catalog(directory: Path) -> Iterator[None]:
    """Keep other processes from changing the catalog while this one changes it."""
    with wait_for_lock(directory / _LOCK):
        yield


def _is_step(name: str) -> bool:
    return name.isdecimal() and len(name) <= _MAX_STEP_DIGITS and str(int(name)) == name


def _read(path: Path) -> Catalog | None:
    try:
        if not is_file(path):
            return None
        contents = json.loads(read_whole(path, _MAX_BYTES))
        checksum = contents.pop("crc32c", None)  # older versions wrote none
        if checksum is not None and checksum != _checksum(contents):
            raise ValueError("its checksum is wrong")
        records = tuple(_parse_record(each) for each in contents["checkpoints"])
        keep_after = contents["keep_after"]
        retention = Retention(**contents["retention"])
        if len({record.step for record in records}) < len(records):
            raise ValueError("a step is listed twice")
        return Catalog(records, None if keep_after is None else float(keep_after), retention)
    except FileNotFoundError:  # deleted meanwhile
        return None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _checksum(contents: dict[str, Any]) -> str:
    """Protects the times: one wrong digit would make an older checkpoint the latest."""
    return crc32c_of_text(json.dumps(contents, sort_keys=True))


def _parse_record(contents: dict[str, Any]) -> Record:
    role = contents["role"]
    if role not in (NEWEST, KEPT, PASSED):
        raise ValueError(f"unknown role {role!r}")
    metrics = {str(name): float(value) for name, value in contents["metrics"].items()}
    step = int(contents["step"])
    time = check_time(float(contents["time"]))
    return Record(step, time, metrics, role, bool(contents["pinned"]))


def _discover(path: Path, step: int, has_catalog: bool) -> Record | None:
    """Return a record of an unlisted checkpoint; None if it was just deleted."""
    try:
        manifest = read_manifest(path)
    except DamagedError:
        manifest = None
    if manifest is not None:
        return Record(step, manifest.time, manifest.metrics, NEWEST if has_catalog else KEPT)
    try:
        return Record(step, path.stat().st_mtime, role=KEPT)
    except FileNotFoundError:
        return None
