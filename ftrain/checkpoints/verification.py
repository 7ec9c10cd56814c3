"""Verification: are the files and values of a checkpoint those that were written?"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ftrain.checkpoints.array_values import crc32c_of, digest_of, in_parallel
from ftrain.checkpoints.errors import CheckpointError, DamagedError, summarize_error
from ftrain.checkpoints.manifest import (
    MANIFEST_FILE,
    Leaf,
    Manifest,
    format_index,
    parse_index,
    read_manifest,
    whole_index,
)
from ftrain.checkpoints.matching import describe_leaf
from ftrain.checkpoints.orbax_layout import (
    COMMITTED,
    Specs,
    is_checkpoint,
    leaf_specs,
    open_leaves,
)
from ftrain.paths import local_path
from ftrain.storage import exists, is_file, list_files, raise_if_transient, retry


def verify(directory: str | Path) -> list[str]:
    """Return everything that is wrong with a checkpoint, by file and by leaf; [] if it is intact.

    A checkpoint that plain Orbax wrote has no manifest; of it, only unreadable leaves are reported.
    """
    directory = local_path(directory)
    if not is_checkpoint(directory):
        raise CheckpointError(f"{directory} is not a checkpoint")
    return retry(lambda: _find_damage(directory))


def _find_damage(directory: Path) -> list[str]:
    wrong: list[str] = []
    try:
        manifest = read_manifest(directory)
        if manifest is None:
            return _find_unreadable(directory)
        wrong = find_wrong_files(directory, manifest)
        wrong += find_wrong_checksums(directory, manifest)
        return wrong + _find_wrong_leaves(directory, manifest)
    except DamagedError as error:
        return wrong or error.damage


def find_wrong_files(directory: Path, manifest: Manifest) -> list[str]:
    """Return what is wrong with the names and sizes of files; no file is read."""
    found = list_files(directory)
    found.pop(MANIFEST_FILE, None)
    expected = manifest.files
    wrong = [f"file {name} is missing" for name in expected if name not in found]
    wrong += [f"file {name} is unexpected" for name in found if name not in expected]
    wrong += [
        f"file {name} has {found[name]} bytes, expected {file.size}"
        for name, file in expected.items()
        if name in found and found[name] != file.size
    ]
    if directory.name.isdecimal() and manifest.step != int(directory.name):
        wrong.append(f"file {MANIFEST_FILE} is of step {manifest.step}")
    return wrong


def find_wrong_checksums(
    directory: Path, manifest: Manifest, sizes: range | None = None
) -> list[str]:
    """Return the files, or those of certain sizes, whose bytes are not those that were written."""

    def check(name: str) -> str | None:
        try:
            found = crc32c_of(directory / name)
        except OSError as error:
            raise_if_transient(error, directory / name)
            return f"file {name} cannot be read: {error.strerror}"
        expected = manifest.files[name].crc32c
        if found == expected:
            return None
        return f"file {name} has crc32c {found}, expected {expected}"

    files = [name for name, file in manifest.files.items() if sizes is None or file.size in sizes]
    existing = [name for name in files if is_file(directory / name)]
    return [wrong for wrong in in_parallel(check, existing) if wrong]


def has_saved_values(value: np.ndarray, leaf: Leaf) -> bool:
    """Return True if a whole leaf has the values that were saved."""
    whole = format_index(whole_index(leaf.shape), leaf.shape)
    return all(
        digest_of(value if index == whole else value[parse_index(index)]) == digest
        for index, digest in leaf.pieces.items()
    )


def _find_unreadable(directory: Path) -> list[str]:
    """Return what cannot be read of a checkpoint without a manifest."""
    wrong: list[str] = []
    if not exists(directory / COMMITTED):
        wrong.append(f"file {COMMITTED} is missing: it was never finished")
    specs = leaf_specs(directory)
    return wrong + _check_leaves(directory, specs, dict.fromkeys(specs))


def _find_wrong_leaves(directory: Path, manifest: Manifest) -> list[str]:
    """Return the leaves whose values are not those that were saved, each read by itself."""
    specs = leaf_specs(directory)
    stored = {name: leaf for name, leaf in manifest.leaves.items() if 0 not in leaf.shape}
    wrong = [f"leaf {name} is missing" for name in stored if name not in specs]
    wrong += [f"leaf {name} is unexpected" for name in specs if name not in stored]
    readable = {name: leaf for name, leaf in stored.items() if name in specs}
    return wrong + _check_leaves(directory, specs, readable)


def _check_leaves(directory: Path, specs: Specs, leaves: Mapping[str, Leaf | None]) -> list[str]:
    """Return what is wrong with leaves; None stands for a leaf without a manifest."""

    def check(name: str) -> str | None:
        leaf = leaves[name]
        try:
            found = open_leaves(directory, specs, [name])[name]
            if leaf is not None and describe_leaf(found) != describe_leaf(leaf):
                return f"leaf {name} is {describe_leaf(found)}, expected {describe_leaf(leaf)}"
            value = found.read()
            if leaf is None or has_saved_values(value, leaf):
                return None
            return f"leaf {name} has other values than were saved"
        except DamagedError as error:
            return error.damage[0]
        except ValueError as error:
            raise_if_transient(error, directory)
            return f"leaf {name} cannot be read: {summarize_error(error)}"

    return [wrong for wrong in in_parallel(check, leaves) if wrong]
