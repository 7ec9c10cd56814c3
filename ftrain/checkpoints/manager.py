"""The checkpoint manager: numbered checkpoints of one pytree in a directory."""

import operator
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ftrain.checkpoints.catalog import (
    CATALOG_FILE,
    SAVING,
    SUSPECT,
    Record,
    Retention,
    best_of,
    committed_steps,
    delete_checkpoint,
    numbered_steps,
    pin_checkpoint,
    read_catalog,
    step_path,
)
from ftrain.checkpoints.errors import CheckpointError, DamagedError
from ftrain.checkpoints.manifest import decode_extra, encode_extra, read_manifest
from ftrain.checkpoints.matching import Selection, as_patterns
from ftrain.checkpoints.paths import BEST, LATEST, StepName, checkpoint_directory, step_named
from ftrain.checkpoints.restore import check_leaves, restore_tree
from ftrain.checkpoints.writer import Writer
from ftrain.paths import local_path
from ftrain.storage import exists, list_names, retry
from ftrain.tree import Tree


class CheckpointManager:
    """Saves a pytree under step numbers, and keeps some of its checkpoints.

        with CheckpointManager("runs/mine/checkpoints", keep=3) as manager:
            manager.save(100, tree)
            tree = manager.restore(like=tree)

    Inside of `with`, `save` returns at once and writes in the background; outside, where nothing
    waits at the end of the program, it returns when the checkpoint is written. A checkpoint appears
    under its number when it is complete, and older ones are deleted after that. Opening a directory
    does not change it. The directory of a run stands for the `checkpoints` in it, also if it is
    created later.

    The newest `keep` checkpoints stay (or "all"), and also one every `keep_every_steps` steps, one
    every `keep_every_hours` hours, and the `keep_best` best by `best_metric` of the metrics given
    to `save`; `best_mode` says whether small ("min") or large ("max") values are better. Pinned
    ones stay. Where a step is asked for, "best" and "latest" name these checkpoints.

    A tree with non-finite leaves is saved as `STEP.suspect`, and never becomes the latest. Leaves
    whose name matches a pattern of `allow_nonfinite` are not checked. `on_warning` is called with a
    message when a checkpoint is suspect, or is skipped because it is damaged; by default it warns.
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
        allow_nonfinite: str | Sequence[str] = (),
        on_warning: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._given = local_path(directory)
        self._saved_to: Path | None = None  # stays the directory once it was saved to
        self.retention = Retention(
            keep, keep_every_steps, keep_every_hours, keep_best, best_metric, best_mode
        )
        self.allow_nonfinite = as_patterns(allow_nonfinite)
        Selection(include=self.allow_nonfinite)  # raises if a pattern is invalid
        self.on_warning = on_warning or (lambda text: warnings.warn(text, stacklevel=3))
        self._writer = Writer(self.retention, self.allow_nonfinite, clock)
        self.restored: int | None = None  # the step that `restore` returned last
        self._damaged: set[int] = set()  # steps found to be damaged
        self._entered = False

    @property
    def directory(self) -> Path:
        """The given directory or, if that is a run's, the `checkpoints` in it."""
        return self._saved_to or retry(lambda: checkpoint_directory(self._given))

    def steps(self) -> list[int]:
        """Return the steps that can be restored, in ascending order."""
        steps = retry(lambda: committed_steps(self.directory))
        return [step for step in steps if step not in self._damaged]

    def checkpoints(self) -> list[Record]:
        """Return the checkpoints that can be restored, in the order in which they were saved."""
        records = retry(lambda: read_catalog(self.directory).records)
        return [record for record in records if record.step not in self._damaged]

    def latest(self) -> int | None:
        """Return the step that was saved last, of those that can be restored."""
        records = self.checkpoints()
        return records[-1].step if records else None

    def step_of(self, name: StepName) -> int:
        """Return the step that "best" or "latest" names; a number is returned as it is.

        "best" needs a `keep_best`, of this manager or of the run that saved last: without one, the
        best checkpoint may have been deleted.
        """
        if name in (BEST, LATEST):
            return step_named(self.directory, str(name), self.retention)
        if isinstance(name, str):
            raise CheckpointError(
                f"a step must be a whole number, 'best' or 'latest', got {name!r}"
            )
        return _as_step(name)

    def best(self) -> int | None:
        """Return the step with the best metric.

        Without a `keep_best` of this manager, that of the run that saved last says what is best.
        """
        saved = retry(lambda: read_catalog(self.directory).retention)
        is_unsaid = not self.retention.best and saved.best
        best = best_of(self.checkpoints(), saved if is_unsaid else self.retention, 1)
        return best[0].step if best else None

    def is_empty(self) -> bool:
        """Return True if `restore` has nothing to try: no step has a directory, complete or not.

        If there are only incomplete ones, `latest` returns None, and `restore` reports the damage.
        Steps that this manager found to be damaged do not count.
        """
        return self._newest_candidate() is None

    def unfinished(self) -> list[int]:
        """Return the steps whose saves are under way, or were interrupted."""
        names = retry(lambda: list_names(self.directory))
        found = {name.partition(".")[0] for name in names if SAVING in name}
        return sorted(int(step) for step in found if step.isdecimal())

    def suspects(self) -> list[int]:
        """Return the steps that were set aside because of non-finite leaves."""
        names = retry(lambda: list_names(self.directory))
        found = {name.removesuffix(SUSPECT) for name in names if name.endswith(SUSPECT)}
        return sorted(int(step) for step in found if step.isdecimal())

    def save(
        self,
        step: int,
        tree: Tree,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Start to save `tree` under `step`, after the previous save has finished.

        `extra` is a small mapping of JSON values, infinities and NaN, which is stored and verified
        with the tree; `manager.extra(step)` returns it. If the step exists already, that is an
        error, unless `overwrite`: then the old checkpoint is deleted when the new one is complete.
        """
        step = _as_step(step)
        encoded = encode_extra(extra) if extra else None
        self.wait()
        self._saved_to = self.directory
        self._writer.start(
            self._saved_to,
            step,
            tree,
            metrics or {},
            encoded,
            overwrite=overwrite,
            damaged=self._damaged,
        )
        self._damaged.clear()  # the writer has set them aside
        if not self._entered:
            self.wait()

    def complete(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Add metrics and extra values to a saved checkpoint, for example those of an evaluation.

        The best checkpoints are then chosen again.
        """
        self.wait()
        self._existing_path(step)
        encoded = encode_extra(extra) if extra else None
        self._writer.complete(self.directory, step, metrics or {}, encoded)

    def extra(self, step: StepName) -> dict[str, Any]:
        """Return the extra values that were saved with a checkpoint."""
        number = self.step_of(step)
        path = self._path(number) if number == self.restored else self._existing_path(number)
        manifest = read_manifest(path)
        return {} if manifest is None else decode_extra(manifest.extra or {})

    def restore(
        self,
        like: Tree,
        step: StepName | None = None,
        *,
        strict: bool = True,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        cast: bool = False,
        verify: bool = True,
    ) -> Tree:
        """Return the tree saved under `step`, or the latest one; `step` may be "best".

        `like` gives its structure, shapes, dtypes and shardings. Everything that is read is
        verified, unless `verify` is False. If the latest checkpoint is damaged, the previous one is
        restored, with a warning; if a given `step` is damaged, that is an error.

        `include` and `exclude` are regular expressions for the names of the leaves of `like` to
        restore; the others keep their values. `rename` maps regular expressions for names in the
        checkpoint to names in `like`. With `cast`, numbers take the dtypes of `like`. Without
        `strict`, leaves that are missing or do not fit keep their values.
        """
        self.wait()
        selection = Selection(
            strict, as_patterns(include), as_patterns(exclude), dict(rename or {}), cast
        )
        if step is not None:
            number = self.step_of(step)
            tree = retry(
                lambda: restore_tree(self._existing_path(number), like, selection, verify=verify)
            )
            self.restored = number
            return tree
        damaged: list[DamagedError] = []
        for candidate in self._candidates():

            def load(step: int = candidate) -> Tree:
                return restore_tree(self._path(step), like, selection, verify=verify)

            try:
                tree = retry(load)
            except (CheckpointError, OSError) as error:
                damage = self._as_damage(candidate, error)
                damaged += damage
                self._damaged |= {candidate} if damage else set()
                continue
            if damaged:
                self.on_warning(_describe_loss(damaged, candidate))
            self.restored = candidate
            return tree
        raise self._nothing_to_restore(damaged)

    def check(self, like: Tree, step: StepName | None = None) -> Path:
        """Return the path of a checkpoint that has the leaves of `like`; no values are read."""
        if step is not None:
            path = self._existing_path(step)
            retry(lambda: check_leaves(path, like))
            return path
        damaged: list[DamagedError] = []
        for record in reversed(self.checkpoints()):

            def check(step: int = record.step) -> None:
                check_leaves(self._path(step), like)

            try:
                retry(check)
            except (CheckpointError, OSError) as error:
                damaged += self._as_damage(record.step, error)  # `restore` takes an older one too
            else:
                return self._path(record.step)
        raise self._nothing_to_restore(damaged)

    def wait(self) -> None:
        """Wait for the pending save; raises its error if it failed."""
        for text in self._writer.wait():
            self.on_warning(text)

    def pin(self, step: StepName, pinned: bool = True) -> None:
        """Keep a checkpoint until it is unpinned."""
        number = self.step_of(step)
        self._existing_path(number)
        pin_checkpoint(self.directory, number, pinned)

    def delete(self, step: StepName) -> None:
        """Delete a checkpoint; an error if it is pinned."""
        self.wait()
        number = self.step_of(step)
        self._existing_path(number)
        delete_checkpoint(self.directory, number)

    def close(self) -> None:
        """Wait for the pending save. Later saves return when they are written."""
        self._entered = False
        self.wait()

    def __enter__(self) -> "CheckpointManager":
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _candidates(self) -> Iterator[int]:
        """Yield the newest step that is not known to be damaged, again and again.

        A directory may look empty while another process deletes a checkpoint and adds one.
        """
        looks = 20 if retry(lambda: exists(self.directory / CATALOG_FILE)) else 0
        while True:
            step = self._newest_candidate()
            if step is not None:
                yield step
            elif looks == 0 or self._damaged:
                return
            else:
                looks -= 1
                time.sleep(0.02)

    def _newest_candidate(self) -> int | None:
        """Return the newest step, complete or not, that is not known to be damaged."""
        directory = self.directory
        records = retry(lambda: read_catalog(directory, numbered_steps(directory)).records)
        steps = [record.step for record in records if record.step not in self._damaged]
        return steps[-1] if steps else None

    def _as_damage(self, step: int, error: CheckpointError | OSError) -> list[DamagedError]:
        """Return the damage of a checkpoint; nothing if another process has deleted it."""
        if not retry(lambda: exists(self._path(step))):
            return []
        if not isinstance(error, DamagedError):
            raise error
        return [error]

    def _nothing_to_restore(self, damaged: Sequence[DamagedError]) -> CheckpointError:
        if not damaged:
            return CheckpointError(f"{self.directory}: there is no checkpoint yet")
        newest, *others = damaged
        if not others:
            return newest
        more = [f"{error.path.name} too: {error.damage[0]}" for error in others]
        return DamagedError(newest.path, [*newest.damage[:2], *more, "so none can be restored"])

    def _existing_path(self, step: StepName) -> Path:
        step = self.step_of(step)
        if step not in retry(lambda: committed_steps(self.directory)):
            raise CheckpointError(
                f"{self.directory}: there is no checkpoint of step {step}; there are {self.steps()}"
            )
        return self._path(step)

    def _path(self, step: int) -> Path:
        return step_path(self.directory, step)


def _as_step(step: Any) -> int:
    """Return a step, which may be a scalar of numpy or jax, as a plain integer."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"a step must be a whole number >= 0, got {step!r}")
    return number


def _describe_loss(damaged: Sequence[DamagedError], step: int) -> str:
    errors = "; ".join(f"{error}" for error in damaged)
    lost = max(int(error.path.name) for error in damaged) - step
    return f"{errors}\nresuming from step {step}: the {lost} steps after it are lost"
