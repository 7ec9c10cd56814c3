"""The checkpoint manager: numbered checkpoints of one pytree in a directory."""

import functools
import operator
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ftrain.checkpoints import keeping, writing
from ftrain.checkpoints.catalog import NAME as CATALOG
from ftrain.checkpoints.catalog import committed, numbered, path_of, read_catalog
from ftrain.checkpoints.errors import CheckpointError, DamagedError
from ftrain.checkpoints.extra import decode, encode
from ftrain.checkpoints.finding import directory_of
from ftrain.checkpoints.manifest import read_manifest
from ftrain.checkpoints.matching import Selection, as_patterns
from ftrain.checkpoints.restoring import check_leaves, load
from ftrain.checkpoints.retention import Record, Retention, best_of
from ftrain.checkpoints.writer import Writer
from ftrain.paths import local_path
from ftrain.storage import exists, list_names, retry
from ftrain.tree import Tree


class CheckpointManager:
    """Saves a pytree under step numbers and keeps those that are worth it.

        with CheckpointManager("runs/mine/checkpoints", keep=3) as manager:
            manager.save(100, tree)
            tree = manager.restore(like=tree)

    Inside of `with`, a save returns at once, and writing goes on behind it; outside, where nothing waits for it at the
    end of the program, it returns when all is written. A checkpoint appears under its number all at once, when it is
    complete, and an older one is deleted only after that. Opening a directory does not change it. The directory of a
    run stands for the `checkpoints` in it, also if it becomes one later.

    The newest `keep` stay ("all" of them, if you like), and beside them one every `keep_every_steps` steps, one every
    `keep_every_hours` hours, and the `keep_best` best by `best_metric` of the metrics that were given to `save`, where
    `best_mode` says whether the smallest ("min") or the largest ("max") are better. What is pinned stays too.

    A tree with a leaf that is not finite is written aside, as `STEP.suspect`, and never becomes the latest. Leaves
    whose name matches a pattern of `may_be_infinite` are not looked at. `tell` is called with what was put aside, or
    passed over because it is damaged; it warns, if you give none.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int | Literal["all"] = 3,
        keep_every_steps: int | None = None,
        keep_every_hours: float | None = None,
        keep_best: int = 0,
        best_metric: str = "loss",
        best_mode: Literal["min", "max"] | None = None,
        may_be_infinite: str | Sequence[str] = (),
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._given = local_path(directory)
        self._settled: Path | None = None  # where it has saved
        self.retention = Retention(
            keep, keep_every_steps, keep_every_hours, keep_best, best_metric, best_mode
        )
        self.may_be_infinite = as_patterns(may_be_infinite)
        Selection(include=self.may_be_infinite)  # which says if one is not a pattern
        self.tell = tell or (lambda text: warnings.warn(text, stacklevel=3))
        self._writer = Writer(self.retention, self.may_be_infinite, clock)
        self.restored: int | None = None  # the step whose tree `restore` returned last
        self._damaged: set[int] = set()  # steps that were found to be
        self._entered = False

    @property
    def directory(self) -> Path:
        """Where the checkpoints are: the directory that was given or, if that is a run's, the `checkpoints` in it."""
        return self._settled or retry(lambda: directory_of(self._given))

    def steps(self) -> list[int]:
        """The steps that can be restored, smallest first."""
        return [
            step for step in retry(lambda: committed(self.directory)) if step not in self._damaged
        ]

    def checkpoints(self) -> list[Record]:
        """What can be restored, in the order in which it was saved, with times, metrics, and why it is kept."""
        records = retry(lambda: read_catalog(self.directory).records)
        return [each for each in records if each.step not in self._damaged]

    def latest(self) -> int | None:
        """The step that was saved last, of those that can be restored."""
        records = self.checkpoints()
        return records[-1].step if records else None

    def unfinished(self) -> list[int]:
        """The steps whose saves are under way, or never ended because their process did before."""
        names = retry(lambda: list_names(self.directory))
        found = {name.partition(".")[0] for name in names if writing.SAVING in name}
        return sorted(int(step) for step in found if step.isdecimal())

    def suspects(self) -> list[int]:
        """The steps whose state was put aside, because it was not finite."""
        names = retry(lambda: list_names(self.directory))
        found = {
            name.removesuffix(writing.SUSPECT) for name in names if name.endswith(writing.SUSPECT)
        }
        return sorted(int(step) for step in found if step.isdecimal())

    def best(self) -> int | None:
        """The step with the best metric, of those that are there."""
        best = best_of(self.checkpoints(), self.retention, 1)
        return best[0].step if best else None

    def save(
        self,
        step: int,
        tree: Tree,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Start to save `tree` under `step`, after the save before this one has finished.

        `extra` is a small mapping of what JSON can say, and of infinities and NaN, that is stored with the tree and
        verified with it; `manager.extra(step)` returns it. A step that is there already is an error, unless
        `overwrite`: then the old one goes when the new is complete.
        """
        step = _as_step(step)
        encoded = encode(extra) if extra else None
        self.wait()
        self._settled = self.directory
        self._writer.start(
            self._settled,
            step,
            tree,
            metrics or {},
            encoded,
            overwrite=overwrite,
            damaged=self._damaged,
        )
        self._damaged.clear()  # they are put aside now
        if not self._entered:
            self.wait()

    def complete(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Add metrics and extra values to a checkpoint that is saved: those of an evaluation after it, say.

        The best ones are then chosen again.
        """
        self.wait()
        self._existing(step)
        self._writer.complete(self.directory, step, metrics or {}, encode(extra) if extra else None)

    def extra(self, step: int) -> dict[str, Any]:
        """The extra values that were saved with a checkpoint."""
        manifest = read_manifest(
            self._path(step) if step == self.restored else self._existing(step)
        )
        return {} if manifest is None else decode(manifest.extra or {})

    def restore(
        self,
        like: Tree,
        step: int | None = None,
        *,
        strict: bool = True,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        cast: bool = False,
        verify: bool = True,
    ) -> Tree:
        """The tree saved under `step`, or the latest; `like` gives its structure, shapes, dtypes and shardings.

        Everything that is read is verified, unless `verify` is False. If the latest is damaged the one before it is
        taken, with a warning; a `step` that was asked for is an error then.

        `include` and `exclude` are regular expressions for the names of the leaves of `like` that are taken; the others
        keep their values. `rename` maps regular expressions for names in the checkpoint to names in `like`. With `cast`
        numbers take the dtypes of `like`. Without `strict`, leaves that are missing or do not fit keep their values.
        """
        self.wait()
        selection = Selection(
            strict, as_patterns(include), as_patterns(exclude), dict(rename or {}), cast
        )
        if step is not None:
            tree = retry(lambda: load(self._existing(step), like, selection, verify=verify))
            self.restored = step
            return tree
        found: list[DamagedError] = []
        for newest in self._from_newest():
            try:
                tree = retry(functools.partial(self._load, newest, like, selection, verify))
            except (CheckpointError, OSError) as error:
                damage = self._damage(newest, error)
                found += damage
                self._damaged |= {newest} if damage else set()
                continue
            if found:
                self.tell(_what_was_lost(found, newest))
            self.restored = newest
            return tree
        raise _all_of_them(found) if found else self._nothing()

    def check(self, like: Tree, step: int | None = None) -> Path:
        """The path of a checkpoint, if it is there and its leaves are those of `like`; no values are looked at."""
        if step is not None:
            retry(lambda: check_leaves(self._existing(step), like))
            return self._path(step)
        found: list[DamagedError] = []
        for record in reversed(self.checkpoints()):
            try:
                retry(functools.partial(self._check, record.step, like))
            except (CheckpointError, OSError) as error:
                found += self._damage(record.step, error)  # and an older one will be restored
            else:
                return self._path(record.step)
        raise _all_of_them(found) if found else self._nothing()

    def _from_newest(self) -> Iterator[int]:
        """The steps to try, again and again the newest that is not known to be damaged.

        A directory that is looked at while another process deletes one and adds one may seem to be empty.
        """
        looks = 20 if retry(lambda: exists(self.directory / CATALOG)) else 0
        while True:
            newest = self.newest()
            if newest is not None:
                yield newest
            elif looks == 0 or self._damaged:
                return
            else:
                looks -= 1
                time.sleep(0.02)

    def _damage(self, step: int, error: CheckpointError | OSError) -> list[DamagedError]:
        """What is wrong with a checkpoint that could not be read; nothing, if a process that saves here deleted it."""
        if not retry(lambda: exists(self._path(step))):
            return []
        if not isinstance(error, DamagedError):
            raise error
        return [error]

    def wait(self) -> None:
        """Wait for the save that is under way; what went wrong in it is raised here."""
        for text in self._writer.wait():
            self.tell(text)

    def pin(self, step: int, pinned: bool = True) -> None:
        """Keep a checkpoint until it is unpinned, whatever else would delete it."""
        self._existing(step)
        keeping.pin(self.directory, step, pinned)

    def delete(self, step: int) -> None:
        """Delete a checkpoint; at no moment does half of one stand under its number."""
        self.wait()
        self._existing(step)
        keeping.delete(self.directory, step)

    def close(self) -> None:
        self._entered = False
        self.wait()

    def __enter__(self) -> "CheckpointManager":
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def newest(self) -> int | None:
        """The newest step, finished or not, that was not found to be damaged."""
        records = retry(lambda: read_catalog(self.directory, numbered(self.directory)).records)
        return next(
            (record.step for record in reversed(records) if record.step not in self._damaged), None
        )

    def _nothing(self) -> CheckpointError:
        return CheckpointError(f"{self.directory}: there is no checkpoint yet")

    def _existing(self, step: int) -> Path:
        step = _as_step(step)
        if step not in retry(lambda: committed(self.directory)):
            there = self.steps()
            raise CheckpointError(
                f"{self.directory}: there is no checkpoint of step {step}; there are {there}"
            )
        return self._path(step)

    def _path(self, step: int) -> Path:
        return path_of(self.directory, step)

    def _load(self, step: int, like: Tree, selection: Selection, verify: bool) -> Tree:
        return load(self._path(step), like, selection, verify=verify)

    def _check(self, step: int, like: Tree) -> None:
        check_leaves(self._path(step), like)


def _as_step(step: Any) -> int:
    """A step as a plain number; it may be one of numpy's or jax's."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"a step must be a whole number >= 0, got {step!r}")
    return number


def _all_of_them(found: Sequence[DamagedError]) -> DamagedError:
    """When there is none that is good."""
    newest, *others = found
    if not others:
        return newest
    more = [f"{error.path.name} too: {error.damage[0]}" for error in others]
    return DamagedError(newest.path, [*newest.damage[:2], *more, "so none of them is good"])


def _what_was_lost(found: Sequence[DamagedError], step: int) -> str:
    lost = "; ".join(f"{error}" for error in found)
    newest = max(int(error.path.name) for error in found)
    return f"{lost}\ngoing on from step {step}: what was learned in the {newest - step} steps after it is lost"
