"""Verifying: whether the files and the values of a checkpoint are those that were written."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ftrain.checkpoints.digests import crc32c_of, digest_of, in_parallel
from ftrain.checkpoints.errors import CheckpointError, DamagedError, in_one_line
from ftrain.checkpoints.files import list_files
from ftrain.checkpoints.layout import COMMITTED, Specs, is_tree, leaf_specs, open_leaves
from ftrain.checkpoints.manifest import NAME, Leaf, Manifest, parse_place, read_manifest, whole
from ftrain.checkpoints.matching import describe
from ftrain.paths import local_path
from ftrain.storage import exists, is_file, raise_if_transient, retry


def verify(directory: str | Path) -> list[str]:
    """Everything that is wrong with a checkpoint, by file and by leaf; nothing if it is as it was written.

    Of a checkpoint that plain Orbax wrote, which has no manifest, only what cannot be read at all is known.
    """
    directory = local_path(directory)
    if not is_tree(directory):
        raise CheckpointError(f"{directory} is not a checkpoint")
    return retry(lambda: _find_damage(directory))


def _find_damage(directory: Path) -> list[str]:
    wrong: list[str] = []
    try:
        manifest = read_manifest(directory)
        if manifest is None:
            return _unreadable(directory)
        wrong = wrong_files(directory, manifest) + wrong_sums(directory, manifest)
        return wrong + _wrong_leaves(directory, manifest)
    except DamagedError as error:
        return wrong or error.damage


def wrong_files(directory: Path, manifest: Manifest) -> list[str]:
    """What the names and sizes of the files tell; costs next to nothing."""
    found = list_files(directory)
    found.pop(NAME, None)
    wanted = manifest.files
    wrong = [f"file {name} is missing" for name in wanted if name not in found]
    wrong += [f"file {name} does not belong there" for name in found if name not in wanted]
    wrong += [
        f"file {name} has {found[name]} bytes, expected {file.size}"
        for name, file in wanted.items()
        if name in found and found[name] != file.size
    ]
    if directory.name.isdecimal() and manifest.step != int(directory.name):
        wrong.append(f"file {NAME} is of step {manifest.step}")
    return wrong


def wrong_sums(directory: Path, manifest: Manifest, sizes: range | None = None) -> list[str]:
    """The files, or those of certain sizes, whose bytes are not those that were written."""

    def check(name: str) -> str | None:
        try:
            found = crc32c_of(directory / name)
        except OSError as error:
            raise_if_transient(error, directory / name)
            return f"file {name} cannot be read: {error.strerror}"
        wanted = manifest.files[name].crc32c
        return None if found == wanted else f"file {name} has crc32c {found}, expected {wanted}"

    files = [name for name, file in manifest.files.items() if sizes is None or file.size in sizes]
    there = [name for name in files if is_file(directory / name)]
    return [wrong for wrong in in_parallel(check, there) if wrong]


def is_as_saved(value: np.ndarray, leaf: Leaf) -> bool:
    """Whether a whole leaf has the values that were saved."""
    pieces = {
        place: value if place == whole(leaf.shape) else value[parse_place(place)]
        for place in leaf.pieces
    }
    return all(digest_of(pieces[place]) == wanted for place, wanted in leaf.pieces.items())


def _unreadable(directory: Path) -> list[str]:
    """What cannot be read of a checkpoint without a manifest."""
    wrong = (
        []
        if exists(directory / COMMITTED)
        else [f"file {COMMITTED} is missing: it was never finished"]
    )
    specs = leaf_specs(directory)
    return wrong + _troubles(directory, specs, dict.fromkeys(specs))


def _wrong_leaves(directory: Path, manifest: Manifest) -> list[str]:
    """The leaves whose values are not those that were saved, each read by itself."""
    specs = leaf_specs(directory)
    stored = {name: leaf for name, leaf in manifest.leaves.items() if 0 not in leaf.shape}
    wrong = [f"leaf {name} is missing" for name in stored if name not in specs]
    wrong += [f"leaf {name} does not belong there" for name in specs if name not in stored]
    return wrong + _troubles(
        directory, specs, {name: leaf for name, leaf in stored.items() if name in specs}
    )


def _troubles(directory: Path, specs: Specs, leaves: Mapping[str, Leaf | None]) -> list[str]:
    """What is wrong with leaves, as far as it is known what they must be."""

    def check(name: str) -> str | None:
        leaf = leaves[name]
        try:
            found = open_leaves(directory, specs, [name])[name]
            if leaf is not None and describe(found) != describe(leaf):
                return f"leaf {name} is {describe(found)}, expected {describe(leaf)}"
            value = found.read()
            return (
                None
                if leaf is None or is_as_saved(value, leaf)
                else f"leaf {name} has other values than were saved"
            )
        except DamagedError as error:
            return error.damage[0]
        except ValueError as error:
            raise_if_transient(error, directory)
            return f"leaf {name} cannot be read: {in_one_line(error)}"

    return [each for each in in_parallel(check, leaves) if each]
