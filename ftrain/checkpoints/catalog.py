"""The catalog of a directory: which checkpoints there are, which is the latest, which are kept.

`checkpoints.json` lists the checkpoints in the order in which they were saved. `rotate` decides
which of them are kept; it is pure. A directory is renamed before it is deleted, so that a partly
deleted checkpoint never has the name of a step.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from ftrain.checkpoints.errors import CheckpointError, DamagedError
from ftrain.checkpoints.lock import wait_for_lock
from ftrain.checkpoints.manifest import (
    MANIFEST_FILE,
    Manifest,
    check_time,
    crc32c_of_text,
    read_manifest,
)
from ftrain.checkpoints.orbax_layout import COMMITTED
from ftrain.storage import (
    exists,
    is_directory,
    is_file,
    list_names,
    read_whole,
    replacing,
    write_text,
)

CATALOG_FILE = "checkpoints.json"
# Suffixes of a step's name.
SAVING = ".saving"  # being written
REPLACED = ".replaced"  # the old one, while a new one of the same step takes its place
DELETING = ".deleting"  # being deleted
SUSPECT = ".suspect"  # has non-finite leaves
DAMAGED = ".damaged"  # failed verification
INCOMPLETE = ".incomplete"  # not committed, and in the way of a new checkpoint
# Roles of a checkpoint.
NEWEST = "newest"  # among the newest
KEPT = "kept"  # stays: due by step or by time, or not written by ftrain
PASSED = "passed"  # neither; stays only while it is pinned or among the best
_LOCK = ".catalog.lock"  # held while the catalog is changed; a file, because NFS locks no directory
_MAX_BYTES = 1 << 28
_MAX_STEP_DIGITS = 18
_LEFTOVER = re.compile(
    rf"\d+({SAVING}.*|(\.\w+)?{DELETING}|\.orbax-checkpoint-tmp.*)|\..+\.json\.\d+"
)


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
                f"keep_best by {self.metric!r} needs best_mode, 'min' or 'max': "
                "whether small or large values are better"
            )


@dataclasses.dataclass(frozen=True)
class Catalog:
    """The checkpoints of a directory in the order of their saves; the last is the latest."""

    records: tuple[Record, ...] = ()
    keep_after: float | None = None  # a checkpoint saved after this time stays
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

    `records` are in the order in which they were saved. One that leaves the newest stays if
    its step is a multiple of `every_steps`, or if it was saved after `keep_after`, which then
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
    of them stay, and so do those that plain Orbax wrote.
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


def add_checkpoint(directory: Path, record: Record, retention: Retention, opened: float) -> None:
    """Make a checkpoint that was just written the latest, and delete those that need not stay.

    `opened` is when the directory was first saved to, as far as this process knows. The hours of
    `keep_every_hours` count from there until the catalog has a time of its own.
    """
    with lock_catalog(directory):
        catalog = read_catalog(directory)
        replaced = catalog.find(record.step)
        is_pinned = replaced is not None and replaced.pinned
        others = catalog.without(record.step).records
        records = (*others, dataclasses.replace(record, pinned=is_pinned))
        _rotate(directory, dataclasses.replace(catalog, records=records), retention, opened)


def complete_checkpoint(
    directory: Path,
    step: int,
    metrics: dict[str, float],
    extra: dict[str, Any],
    retention: Retention,
    opened: float,
) -> None:
    """Add metrics and extra values to a checkpoint, and choose again which ones stay.

    Nothing is written if the checkpoint already has all of them.
    """
    with lock_catalog(directory):
        catalog = read_catalog(directory)
        path = step_path(directory, step)
        record = catalog.find(step)
        manifest = read_manifest(path) if record is not None else None
        if record is None or manifest is None:  # just deleted, or written by plain Orbax
            return
        all_metrics = {**manifest.metrics, **metrics}
        all_extra = {**(manifest.extra or {}), **extra} or None
        if all_metrics == manifest.metrics == record.metrics and all_extra == manifest.extra:
            return
        update = {"metrics": all_metrics, "extra": all_extra}
        _replace_manifest(path, manifest.model_copy(update=update))
        catalog = catalog.replace(step, metrics={**record.metrics, **all_metrics})
        _rotate(directory, catalog, retention, opened)


def pin_checkpoint(directory: Path, step: int, pinned: bool) -> None:
    """Pin or unpin a checkpoint in the catalog."""
    with lock_catalog(directory):
        catalog = read_catalog(directory)
        if catalog.find(step) is None:
            raise CheckpointError(
                f"{directory}: the checkpoint of step {step} has just been deleted"
            )
        catalog.replace(step, pinned=pinned).write(directory)


def delete_checkpoint(directory: Path, step: int) -> None:
    """Delete a checkpoint, unless it is pinned."""
    with lock_catalog(directory):
        catalog = read_catalog(directory)
        record = catalog.find(step)
        if record is not None and record.pinned:
            raise CheckpointError(f"{directory / str(step)} is pinned; unpin it first")
        discard(directory / str(step))
        catalog.without(step).write(directory)


def prune_suspects(directory: Path, keep: int | Literal["all"]) -> None:
    """Delete suspects except the first, which is nearest to the cause, and the newest others."""
    if keep == "all":
        return
    paths = [directory / name for name in list_names(directory) if name.endswith(SUSPECT)]
    suspects = sorted(paths, key=lambda path: path.stat().st_mtime)
    for path in suspects[1 : max(1, len(suspects) - keep + 1)]:
        discard(path)


def discard(path: Path) -> None:
    """Rename a checkpoint's directory, then delete it."""
    renamed = path.with_name(f"{path.name}{DELETING}")
    shutil.rmtree(renamed, ignore_errors=True)
    path.rename(renamed)
    shutil.rmtree(renamed)


def move_aside(path: Path, suffix: str) -> Path:
    """Rename a path to a free name with a suffix, and return the new path."""
    aside = path.with_name(f"{path.name}{suffix}")
    number = 1
    while exists(aside):
        number += 1
        aside = path.with_name(f"{path.name}{suffix}{number}")
    return path.rename(aside)


def remove_leftovers(directory: Path) -> None:
    """Finish or undo what a killed process left half written, half deleted or half replaced."""
    for path in sorted(directory.iterdir()):
        if re.fullmatch(rf"\d+(\{SUSPECT})?\{REPLACED}", path.name):
            final = path.with_name(path.name.removesuffix(REPLACED))
            discard(path) if exists(final) else path.rename(final)
        elif _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_step(name: str) -> bool:
    """Return True for the name of a checkpoint's directory, such as 500."""
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
    """Return a checksum; one wrong digit of a time would make an older checkpoint the latest."""
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


def _rotate(directory: Path, catalog: Catalog, retention: Retention, opened: float) -> None:
    """Write the catalog of the checkpoints that stay, and delete the others."""
    first = opened + (retention.every_hours or 0) * 3600
    after = first if catalog.keep_after is None else catalog.keep_after
    kept, deleted, after = rotate(catalog.records, retention, after)
    Catalog(tuple(kept), after if retention.every_hours else None, retention).write(directory)
    for record in deleted:
        discard(directory / str(record.step))


def _replace_manifest(path: Path, manifest: Manifest) -> None:
    # The temporary file is outside of the checkpoint: inside, verification would not expect it.
    # If this process is killed, `remove_leftovers` deletes it.
    temporary = path.with_name(f".{path.name}.{MANIFEST_FILE}.{os.getpid()}")
    with replacing(path / MANIFEST_FILE, temporary):
        temporary.write_text(manifest.as_text())
