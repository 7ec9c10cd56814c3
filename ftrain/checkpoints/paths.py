"""Paths: find the checkpoint that a user's path stands for, and watch a directory for new ones."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ftrain.checkpoints.catalog import Catalog, numbered_steps, read_catalog
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.orbax_layout import COMMITTED, has_orbax_files, is_checkpoint
from ftrain.formats import TfCheckpointError, is_tf_checkpoint, latest_tf_checkpoint
from ftrain.paths import local_path
from ftrain.storage import exists, is_directory, retry

CHECKPOINTS = "checkpoints"  # the directory of checkpoints in a run's directory
_POLL = 0.5  # seconds


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the checkpoint that was saved last in a directory of checkpoints or of a run.

    In a directory of TensorFlow checkpoints, return the prefix of its latest.
    """
    given = local_path(directory)
    return retry(lambda: _find_latest(given))


def checkpoint_exists(path: str | Path) -> bool:
    """Return True for a complete checkpoint of ftrain or Orbax, or a prefix of TensorFlow's."""
    given = local_path(path)
    inside = given.parent / CHECKPOINTS / given.name
    return retry(
        lambda: (
            is_tf_checkpoint(given)
            or any(exists(each / COMMITTED) and is_checkpoint(each) for each in (given, inside))
        )
    )


def checkpoint_state(directory: str | Path) -> Catalog | None:
    """Return the catalog of a directory, made to agree with the disk; None if it is empty."""
    given = local_path(directory)
    catalog = retry(lambda: read_catalog(checkpoint_directory(given)))
    return catalog if catalog.records else None


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint at a path, or the latest in a directory of checkpoints or of a run."""
    path = local_path(path)
    if path.name.endswith(".index") and is_tf_checkpoint(path.with_suffix("")):
        return path.with_suffix("")
    if is_tf_checkpoint(path) or is_checkpoint(path):
        return path
    inside = path.parent / CHECKPOINTS / path.name  # RUN/500 is short for RUN/checkpoints/500
    if is_checkpoint(inside):
        return inside
    if is_directory(path) and (latest := _find_latest(path)) is not None:
        return latest
    raise CheckpointError(
        f"{path} {describe_path(path)}; "
        "expected a checkpoint, a directory of checkpoints or of a run, "
        "or the prefix of a TensorFlow checkpoint"
    )


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
        ".safetensors": "a safetensors file: read it with safetensors.numpy.load_file",
        ".npz": "a file of numpy arrays: read it with numpy.load",
        ".npy": "a numpy array: read it with numpy.load",
        ".h5": "an HDF5 file, as Keras writes them",
        ".keras": "a Keras archive",
        ".pt": "a PyTorch file",
        ".pth": "a PyTorch file",
        ".msgpack": "a msgpack file, as flax writes them: read it with flax.serialization",
        ".pb": "a TensorFlow graph, which holds no variables",
    }
    suffix = path.suffix.lower()
    return known.get(suffix, f"a {suffix} file" if suffix else "a file")
