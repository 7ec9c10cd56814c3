"""Paths: find the checkpoint that a user's path stands for, and watch a directory for new ones."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from ftrain.checkpoints.catalog import (
    Catalog,
    Retention,
    best_of,
    committed_steps,
    numbered_steps,
    read_catalog,
)
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.orbax_layout import COMMITTED, has_orbax_files, is_checkpoint
from ftrain.formats import (
    SafetensorsError,
    TfCheckpointError,
    find_safetensors,
    is_tf_checkpoint,
    latest_tf_checkpoint,
)
from ftrain.paths import local_path
from ftrain.storage import exists, is_directory, is_file, retry

CHECKPOINTS = "checkpoints"  # the directory of checkpoints in a run's directory
BEST = "best"  # these names are accepted wherever a step is
LATEST = "latest"
StepName = int | Literal["best", "latest"]
_POLL = 0.5  # seconds


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the checkpoint that was saved last in a directory of checkpoints or of a run.

    In a directory of TensorFlow checkpoints, return the prefix of its latest.
    """
    given = local_path(directory)
    return retry(lambda: _find_latest(given))


def checkpoint_exists(path: str | Path) -> bool:
    """Return True for a complete checkpoint of ftrain or Orbax, or one of another program."""
    given = local_path(path)
    inside = given.parent / CHECKPOINTS / given.name
    return retry(
        lambda: (
            is_tf_checkpoint(given)
            or _is_array_file(given)
            or any(exists(each / COMMITTED) and is_checkpoint(each) for each in (given, inside))
        )
    )


def checkpoint_state(directory: str | Path) -> Catalog | None:
    """Return the catalog of a directory, made to agree with the disk; None if it is empty."""
    given = local_path(directory)
    catalog = retry(lambda: read_catalog(checkpoint_directory(given)))
    return catalog if catalog.records else None


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint at a path, or the latest in a directory of checkpoints or of a run.

    `RUN/best` and `RUN/latest` are the checkpoints of these roles, `RUN/500` that of a step.
    """
    path = local_path(path)
    if path.name.endswith(".index") and is_tf_checkpoint(path.with_suffix("")):
        return path.with_suffix("")
    if is_tf_checkpoint(path) or is_checkpoint(path):
        return path
    inside = path.parent / CHECKPOINTS / path.name  # RUN/500 is short for RUN/checkpoints/500
    if is_checkpoint(inside):
        return inside
    if path.name in (BEST, LATEST) and not exists(path) and is_directory(path.parent):
        home = checkpoint_directory(path.parent)
        return home / str(step_named(home, path.name))
    if is_directory(path) and (latest := _find_latest(path)) is not None:
        return latest
    if _is_array_file(path):
        return path
    raise CheckpointError(
        f"{path} {describe_path(path)}; "
        "expected a checkpoint, a directory of checkpoints or of a run, "
        "the prefix of a TensorFlow checkpoint, a .safetensors or .npz file, "
        "or a directory of safetensors files"
    )


def step_named(directory: Path, name: str, retention: Retention | None = None) -> int:
    """Return the step of the best or the latest checkpoint in a directory of checkpoints.

    What is best is said by `retention`, or by the retention of the run that saved last.
    """
    catalog = retry(lambda: read_catalog(directory))
    if not catalog.records:
        raise CheckpointError(f"{directory}: there is no checkpoint yet")
    if name == LATEST:
        return catalog.records[-1].step
    policy = retention if retention is not None and retention.best else catalog.retention
    steps = ", ".join(str(step) for step in committed_steps(directory))
    if not policy.best:
        raise CheckpointError(
            f"{directory}: its run does not say which checkpoint is the best; set keep_best, "
            f"best_metric and best_mode in [checkpoint], or name a step: {steps}"
        )
    best = best_of(catalog.records, policy, 1)
    if not best:
        raise CheckpointError(
            f"{directory}: none of its checkpoints has a finite {policy.metric!r}, which decides "
            f"what is best; set best_metric in [checkpoint], or name a step: {steps}"
        )
    return best[0].step


def _is_array_file(path: Path) -> bool:
    """Return True for an .npz or .safetensors file, or a directory of safetensors files."""
    try:
        return (path.suffix == ".npz" and is_file(path)) or find_safetensors(path) is not None
    except SafetensorsError as error:  # a directory of several files without an index
        raise CheckpointError(str(error)) from error


def describe_path(path: Path) -> str:
    """Return what is at a path that is not a checkpoint, as the end of a sentence."""
    inside = next((parent for parent in path.parents if has_orbax_files(parent)), None)
    if inside is not None and path.exists():
        return f"is a part of the checkpoint {inside}: use that path"
    if path.is_dir():
        return "holds no checkpoint"
    if not path.is_file():
        return "is a broken link" if path.is_symlink() else "does not exist"
    prefix = re.sub(r"\.(meta|data-\d{5}-of-\d{5})$", "", path.name)
    if prefix != path.name:
        is_whole = is_tf_checkpoint(path.with_name(prefix))
        way_out = (
            f"use {path.with_name(prefix)}" if is_whole else f"{prefix}.index is missing beside it"
        )
        return f"is one file of a TensorFlow checkpoint: {way_out}"
    if path.name == "checkpoint":
        return f"is TensorFlow's list of checkpoints: use its directory, {path.parent}"
    return f"is {_describe_file(path)}, not a checkpoint"


def checkpoint_directory(path: str | Path) -> Path:
    """Return the directory of checkpoints for a path that is one, or that is a run directory."""
    path = local_path(path)
    inner = path / CHECKPOINTS
    return inner if is_directory(inner) and not numbered_steps(path) else path


def wait_for_checkpoint(
    directory: str | Path,
    *,
    after: int = -1,
    timeout: float | None = None,
    poll: float = _POLL,
    stop: Callable[[], bool] = lambda: False,
) -> int | None:
    """Wait for a checkpoint after step `after`, and return the step of the latest one.

    Returns None after `timeout` seconds (None: no limit), or once `stop` returns True. The
    directory, of checkpoints or of a run, may be created later.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        # Decide before looking: a run saves its last checkpoint just before it ends.
        is_last_look = stop() or (deadline is not None and time.monotonic() >= deadline)
        latest = _latest_step(directory)
        if latest is not None and latest > after:
            return latest
        if is_last_look:
            return None
        time.sleep(poll if deadline is None else min(poll, max(0.0, deadline - time.monotonic())))


def checkpoints_iterator(
    directory: str | Path,
    *,
    after: int = -1,
    timeout: float | None = None,
    poll: float = _POLL,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Yield the step of each new checkpoint.

    Ends when none has appeared for `timeout` seconds, or once `stop` returns True. If several have
    appeared since the last one was yielded, only the latest is.
    """
    step: int | None = after
    while (
        step := wait_for_checkpoint(directory, after=step, timeout=timeout, poll=poll, stop=stop)
    ) is not None:
        yield step


def _latest_step(directory: str | Path) -> int | None:
    given = local_path(directory)
    records = retry(lambda: read_catalog(checkpoint_directory(given)).records)
    return records[-1].step if records else None


def _find_latest(directory: Path) -> Path | None:
    home = checkpoint_directory(directory)
    records = read_catalog(home).records
    if records:
        return home / str(records[-1].step)
    try:
        return latest_tf_checkpoint(home)
    except TfCheckpointError as error:
        raise CheckpointError(str(error)) from error


def _describe_file(path: Path) -> str:
    known = {
        ".npy": "a single numpy array: put it into an .npz file, which names it",
        ".h5": "an HDF5 file, as Keras writes them",
        ".keras": "a Keras archive",
        ".pt": "a PyTorch file",
        ".pth": "a PyTorch file",
        ".msgpack": "a msgpack file, as flax writes them: read it with flax.serialization",
        ".pb": "a TensorFlow graph, which holds no variables",
    }
    suffix = path.suffix.lower()
    return known.get(suffix, f"a {suffix} file" if suffix else "a file")
