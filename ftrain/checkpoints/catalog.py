"""The catalog of a directory: a small file that says which checkpoint is the latest, and why each is there."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftrain.checkpoints.digests import crc32c_of_text
from ftrain.checkpoints.errors import DamagedError
from ftrain.checkpoints.layout import COMMITTED
from ftrain.checkpoints.lock import wait_for
from ftrain.checkpoints.manifest import check_time, read_manifest
from ftrain.checkpoints.retention import KEPT, NEWEST, PASSED, Record, Retention
from ftrain.formats.whole_files import read_whole, write_whole
from ftrain.storage import exists, is_directory, is_file, list_names

NAME = "checkpoints.json"
LOCK = ".catalog.lock"  # held while the catalog is changed; a file, because NFS locks no directory
MAX_BYTES = 1 << 28  # of it
_MOST_DIGITS = 18  # of a step
REPLACED = ".replaced"  # behind a step: the old one, while a new one takes its place


@dataclasses.dataclass(frozen=True)
class Catalog:
    """The checkpoints of a directory, in the order in which they were saved: the last is the latest."""

    records: tuple[Record, ...] = ()
    keep_after: float | None = None  # when the next one is due to be kept for good
    retention: Retention = dataclasses.field(
        default_factory=Retention
    )  # by which those that stay were chosen last

    def replace(self, step: int, **changes: Any) -> "Catalog":
        changed = (
            dataclasses.replace(each, **changes) if each.step == step else each
            for each in self.records
        )
        return dataclasses.replace(self, records=tuple(changed))

    def without(self, step: int) -> "Catalog":
        return dataclasses.replace(
            self, records=tuple(each for each in self.records if each.step != step)
        )

    def write(self, directory: Path) -> None:
        contents = {
            "latest": self.records[-1].step if self.records else None,
            "keep_after": self.keep_after,
            "retention": dataclasses.asdict(self.retention),
            "checkpoints": [dataclasses.asdict(record) for record in self.records],
        }
        contents["crc32c"] = _checksum(contents)
        write_whole(directory / NAME, json.dumps(contents, indent=1) + "\n")


def numbered(directory: Path) -> list[int]:
    """The steps that there are directories of, finished or not, smallest first."""
    listed = {name: name.removesuffix(REPLACED) for name in list_names(directory)}
    steps = {name: step for name, step in listed.items() if _is_step(step)}
    return sorted({int(step) for name, step in steps.items() if is_directory(directory / name)})


def _is_step(name: str) -> bool:
    return name.isdecimal() and len(name) <= _MOST_DIGITS and str(int(name)) == name


def committed(directory: Path) -> list[int]:
    """The steps whose checkpoints were finished, smallest first."""
    return [step for step in numbered(directory) if exists(path_of(directory, step) / COMMITTED)]


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is: while it is being replaced, for a moment, not under its own name."""
    path = directory / str(step)
    aside = path.with_name(f"{step}{REPLACED}")
    return aside if exists(aside) and not exists(path) else path


def read_catalog(directory: Path, steps: Sequence[int] | None = None) -> Catalog:
    """The catalog, made to agree with the disk: what is gone is left out, and what is not listed is added.

    A checkpoint that is not listed although there is a list was saved by a process that was killed just then. Without a
    list that can be read nothing is known, so whatever is there is kept for good; as is what plain Orbax wrote.
    """
    steps = committed(directory) if steps is None else steps
    listed = _read(directory / NAME)
    records = [record for record in listed.records if record.step in steps] if listed else []
    unlisted = sorted(set(steps) - {record.step for record in records})
    found = [
        _discover(path_of(directory, step), step, is_ours=listed is not None) for step in unlisted
    ]
    records += [record for record in found if record is not None]
    in_order = tuple(sorted(records, key=lambda record: record.time))
    return dataclasses.replace(listed or Catalog(), records=in_order)


@contextmanager
def changing(directory: Path) -> Iterator[None]:
    """While a catalog is read, changed and written back, nobody else does."""
    with wait_for(directory / LOCK):
        yield


def _read(path: Path) -> Catalog | None:
    try:
        if not is_file(path):
            return None
        contents = json.loads(read_whole(path, MAX_BYTES))
        checksum = contents.pop("crc32c", None)  # older versions wrote none
        if checksum is not None and checksum != _checksum(contents):
            raise ValueError("its checksum is wrong")
        records = tuple(_record(each) for each in contents["checkpoints"])
        after = contents["keep_after"]
        retention = Retention(**contents["retention"])
        if len({record.step for record in records}) < len(records):
            raise ValueError("a step is listed twice")
        return Catalog(records, None if after is None else float(after), retention)
    except FileNotFoundError:  # deleted since
        return None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _checksum(contents: dict[str, Any]) -> str:
    """One wrong digit of a time would make an older checkpoint the latest."""
    return crc32c_of_text(json.dumps(contents, sort_keys=True))


def _record(contents: dict[str, Any]) -> Record:
    role = contents["role"]
    if role not in (NEWEST, KEPT, PASSED):
        raise ValueError(f"a checkpoint is not {role}")
    metrics = {str(name): float(value) for name, value in contents["metrics"].items()}
    record = Record(
        int(contents["step"]), float(contents["time"]), metrics, role, bool(contents["pinned"])
    )
    check_time(record.time)
    return record


def _discover(path: Path, step: int, is_ours: bool) -> Record | None:
    """A checkpoint that the catalog does not list; None if it has just been deleted."""
    try:
        manifest = read_manifest(path)
    except DamagedError:
        manifest = None
    if manifest is not None:
        return Record(step, manifest.time, manifest.metrics, NEWEST if is_ours else KEPT)
    try:
        return Record(step, path.stat().st_mtime, role=KEPT)
    except FileNotFoundError:
        return None
