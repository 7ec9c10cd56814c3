"""Exporting: the leaves of a checkpoint as one file that other programs read."""

import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from ftrain.checkpoints.errors import CheckpointError
from ftrain.checkpoints.matching import Selection, as_patterns
from ftrain.checkpoints.reader import CheckpointReader
from ftrain.formats.whole_files import sync

Format = Literal["safetensors", "npz"]


def export(
    reader: CheckpointReader,
    path: Path,
    to: Format,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    done: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Write the leaves whose whole names match to `path`, all at once when it is complete; the answer are their names.

    numpy's own format knows no bfloat16 and its like: those become float32 there, which holds all their values.
    """
    chosen = Selection(include=as_patterns(include), exclude=as_patterns(exclude))
    names = [name for name in reader.variables if chosen.takes(name)]
    if not names:
        raise CheckpointError(
            f"{reader.path}: of its {len(reader.variables)} leaves none is chosen by its whole name"
        )
    if not path.parent.is_dir():
        raise CheckpointError(f"{path} cannot be written: there is no directory {path.parent}")
    text = [name for name in names if reader.variables[name].dtype == "string"]
    if text:
        raise CheckpointError(
            f"{reader.path}: leaf {text[0]} is text, which {to} does not hold; exclude it"
        )
    beside = path.with_name(f".{path.name}.part")
    try:
        {"safetensors": _write_safetensors, "npz": _write_npz}[to](reader, names, beside, done)
        sync(beside)
        beside.chmod(0o666 & ~_umask())  # safetensors would keep others from reading it
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return names


def _write_safetensors(
    reader: CheckpointReader, names: Sequence[str], path: Path, done: Callable[[str], None]
) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays: dict[str, np.ndarray] = {}
    for name in names:
        arrays[name] = np.asarray(reader.read(name), order="C")
        done(name)
    try:
        save_file(arrays, path)
    except SafetensorError as error:
        raise CheckpointError(f"{reader.path}: safetensors does not take it: {error}") from error


def _write_npz(
    reader: CheckpointReader, names: Sequence[str], path: Path, done: Callable[[str], None]
) -> None:
    """One leaf at a time, so that no more than one is in memory."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name in names:
            value = reader.read(name)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(
                    file, value.astype(np.float32) if value.dtype.kind == "V" else value
                )
            done(name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
