"""Finding checkpoints: what a path that a user gives stands for."""

import re
from pathlib import Path

from ftrain.checkpoints.catalog import Catalog, numbered, read_catalog
from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.layout import COMMITTED, has_marks, is_tree
from ftrain.formats import TfCheckpointError, is_tf_checkpoint, latest_tf_checkpoint
from ftrain.paths import local_path
from ftrain.storage import exists, is_directory, retry

_OF_A_RUN = "checkpoints"  # the directory of checkpoints, inside a run's


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The checkpoint that was saved last in a directory of them or of a run; or the prefix of TensorFlow's latest."""
    given = local_path(directory)
    return retry(lambda: _latest(given))


def checkpoint_exists(path: str | Path) -> bool:
    """Whether a path is that of a finished checkpoint, ftrain's or plain Orbax's, or the prefix of TensorFlow's."""
    given = local_path(path)
    inside = given.parent / _OF_A_RUN / given.name
    return retry(
        lambda: (
            is_tf_checkpoint(given)
            or any(exists(each / COMMITTED) and is_tree(each) for each in (given, inside))
        )
    )


def checkpoint_state(directory: str | Path) -> Catalog | None:
    """What a directory's catalog says, made to agree with the disk; None if there is nothing."""
    given = local_path(directory)
    catalog = retry(lambda: read_catalog(directory_of(given)))
    return catalog if catalog.records else None


def locate(path: str | Path) -> Path:
    """The checkpoint that is meant: by itself, or by a directory of checkpoints or of a run, for its latest."""
    path = local_path(path)
    if path.name.endswith(".index") and is_tf_checkpoint(path.with_suffix("")):
        return path.with_suffix("")
    if is_tf_checkpoint(path) or is_tree(path):
        return path
    if is_tree(
        inside := path.parent / _OF_A_RUN / path.name
    ):  # RUN/500 for short, or RUN/500.suspect
        return inside
    is_there = is_directory(path)
    if is_there and (latest := _latest(path)) is not None:
        return latest
    raise CheckpointError(
        f"{path} {describe(path)}; expected a checkpoint, a directory of checkpoints or of a run, or the prefix of a "
        "TensorFlow checkpoint"
    )


def describe(path: Path) -> str:
    """What stands at a path that is no checkpoint, as the end of a sentence, with the way out if there is one."""
    inside = next((parent for parent in path.parents if has_marks(parent)), None)
    if inside is not None and path.exists():
        return f"is a part of the checkpoint {inside}: name that"
    if path.is_dir():
        return "holds no checkpoint"
    if not path.is_file():
        return "is a broken link" if path.is_symlink() else "does not exist"
    prefix = re.sub(r"\.(meta|data-\d{5}-of-\d{5})$", "", path.name)
    if prefix != path.name:
        is_whole = is_tf_checkpoint(path.with_name(prefix))
        way_out = (
            f"name {path.with_name(prefix)}" if is_whole else f"{prefix}.index is missing beside it"
        )
        return f"is one file of a TensorFlow checkpoint: {way_out}"
    if path.name == "checkpoint":
        return f"is the list that TensorFlow keeps of its checkpoints: name its directory, {path.parent}"
    return f"is {_kind(path)}, not a checkpoint"


def _kind(path: Path) -> str:
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


def directory_of(path: str | Path) -> Path:
    """The directory of checkpoints that is meant by a path to it or to a run."""
    path = local_path(path)
    inner = path / _OF_A_RUN
    return inner if is_directory(inner) and not numbered(path) else path


def _latest(directory: Path) -> Path | None:
    home = directory_of(directory)
    records = read_catalog(home).records
    if records:
        return home / str(records[-1].step)
    try:
        return latest_tf_checkpoint(home)
    except TfCheckpointError as error:
        raise CheckpointError(str(error)) from error
