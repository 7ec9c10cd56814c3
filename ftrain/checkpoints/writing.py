"""Writing one checkpoint: by Orbax under another name, then its manifest, and last its own name, all at once."""

import atexit
import dataclasses
import functools
import logging
import re
import shutil
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ftrain.checkpoints.catalog import REPLACED
from ftrain.checkpoints.digests import crc32c_of, digest_of, in_parallel, is_finite
from ftrain.checkpoints.errors import SaveError
from ftrain.checkpoints.files import list_files
from ftrain.checkpoints.layout import leaf_specs, open_leaves
from ftrain.checkpoints.manifest import MARK, File, Leaf, Manifest, place_of
from ftrain.checkpoints.snapshot import Held, as_saved
from ftrain.checkpoints.together import gather, limit_for, take_back, tell_failure, wait_until_gone
from ftrain.formats.whole_files import sync
from ftrain.storage import exists
from ftrain.tree import Tree, named_leaves

SAVING, DELETING = ".saving", ".deleting"
SUSPECT, DAMAGED, INCOMPLETE = ".suspect", ".damaged", ".incomplete"
_LEFTOVER = re.compile(
    rf"\d+({SAVING}.*|(\.\w+)?{DELETING}|\.orbax-checkpoint-tmp.*)|\..+\.json\.\d+"
)


def _is_news(record: logging.LogRecord) -> bool:
    """Errors of Orbax are raised, and told once: not in its log too, with the tracebacks of all its threads."""
    if "_SignalingThread.run() raised" in record.getMessage():
        return False
    trace = (
        record.exc_info[2] if record.name == "asyncio" and record.exc_info else None
    )  # a task nobody asked
    return not any(
        "orbax" in Path(frame.f_code.co_filename).parts for frame, _ in traceback.walk_tb(trace)
    )


for _name in (
    "absl",
    "asyncio",
):  # for good: some of its threads and tasks end after the error was raised
    logging.getLogger(_name).addFilter(_is_news)


class _Response(Protocol):
    def result(self) -> object: ...


@dataclasses.dataclass(frozen=True)
class Order:
    """A checkpoint that is to be written."""

    directory: Path
    step: int
    held: Tree  # of `Held`
    time: float
    metrics: dict[str, float]
    may_be_infinite: tuple[str, ...]  # patterns of leaves that are fine if they are not finite
    extra: dict[str, Any] | None = None  # encoded
    begun: _Response | None = (
        None  # Orbax, already at it: all processes of a job must call it in the same order
    )

    @property
    def staged(self) -> Path:
        return self.directory / f"{self.step}{SAVING}"


def begin(path: Path, tree: Tree) -> _Response:
    """Have Orbax write as it is given, without a copy of its own, and without compressing what hardly shrinks."""
    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False
    context.array.saving.use_compression = False
    context.asynchronous.create_directories_asynchronously = (
        False  # or what cannot be made is waited for in vain
    )
    with context:
        return ocp.save_async(str(_alias(path.parent) / path.name), tree, custom_metadata={**MARK})


@functools.cache
def _alias(directory: Path) -> Path:
    """A path of a directory without wildcards: Orbax would look for its files in whatever else they match."""
    if not any(character in str(directory) for character in "*?[\\"):
        return directory
    link = Path(tempfile.mkdtemp(prefix="ftrain-"), "checkpoints")
    link.symlink_to(directory)
    atexit.register(shutil.rmtree, link.parent, ignore_errors=True)
    return link


def write(order: Order) -> list[str]:
    """Write a checkpoint, whole or not at all; the answer are its leaves that are not finite, and make it suspect."""
    with ThreadPoolExecutor(1) as digesting:
        described = digesting.submit(_describe, named_leaves(order.held))  # while Orbax writes
        response = order.begun or begin(order.staged, jax.tree.map(as_saved, order.held))
        try:
            response.result()
            leaves, not_finite = described.result()
        except Exception as error:
            if jax.process_index() > 0:
                tell_failure(order.staged, error)
            raise
    if jax.process_count() > 1:
        leaves, not_finite = gather(order.staged, leaves, not_finite)
    suspicious = [name for name in not_finite if not _matches(name, order.may_be_infinite)]
    if jax.process_index() == 0:
        _check_written(order.staged, leaves)
        _manifest(order, leaves, suspicious).write(order.staged)
        _put_in_place(order, f"{order.step}{SUSPECT if suspicious else ''}")
    wait_until_gone(order.staged, limit_for(leaves))
    names = (f"{order.step}{SUSPECT}", f"{order.step}")
    if not any(exists(order.directory / name) for name in names):
        take_back(order.staged)
        raise SaveError("process 0 could not finish it")
    return suspicious


def abandon(order: Order) -> None:
    """Remove what was written of a checkpoint that could not be finished: its space may be what was missing."""
    if jax.process_index() == 0 and order.directory.is_dir():
        for path in order.directory.glob(f"{order.step}{SAVING}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Delete a checkpoint; at no moment does half of one stand under its name."""
    aside = path.with_name(f"{path.name}{DELETING}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)


def put_aside(path: Path, suffix: str) -> Path:
    """Rename what stands where something else must, without ever taking a name that is in use."""
    aside, number = path.with_name(f"{path.name}{suffix}"), 1
    while exists(aside):
        number += 1
        aside = path.with_name(f"{path.name}{suffix}{number}")
    return path.rename(aside)


def sweep(directory: Path) -> None:
    """Mend what a killed process left: half written, half deleted, or half replaced."""
    for path in sorted(directory.iterdir()):
        if re.fullmatch(rf"\d+(\{SUSPECT})?\{REPLACED}", path.name):
            final = path.with_name(path.name.removesuffix(REPLACED))
            discard(path) if exists(final) else path.rename(final)
        elif _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_written(staged: Path, leaves: dict[str, Leaf]) -> None:
    """That all leaves are there, before anything older is let go for them: somebody may have been in the directory."""
    specs = leaf_specs(staged)
    stored = {name: leaf for name, leaf in leaves.items() if 0 not in leaf.shape}
    if missing := stored.keys() - specs.keys():
        raise SaveError(f"leaf {min(missing)} was not written")
    written, needed = sum(list_files(staged).values()), sum(leaf.bytes for leaf in stored.values())
    if written < needed:
        raise SaveError(f"of {needed} bytes only {written} were written")
    for name, found in open_leaves(staged, specs, stored).items():
        if (found.shape, found.dtype) != (stored[name].shape, np.dtype(stored[name].dtype)):
            raise SaveError(f"leaf {name} was written as {found.dtype}{list(found.shape)}")


def _manifest(order: Order, leaves: dict[str, Leaf], suspicious: list[str]) -> Manifest:
    files = list_files(order.staged)
    sums = in_parallel(lambda name: crc32c_of(order.staged / name), files)
    for name in files:
        sync(order.staged / name)
    return Manifest(
        step=order.step,
        time=order.time,
        metrics=order.metrics,
        not_finite=suspicious,
        leaves=leaves,
        files={
            name: File(size=files[name], crc32c=crc) for name, crc in zip(files, sums, strict=True)
        },
        extra=order.extra,
    )


def _put_in_place(order: Order, name: str) -> None:
    final = order.directory / name
    replaced = final.with_name(f"{name}{REPLACED}")
    if exists(final):
        final.rename(replaced)
    sync(order.staged)
    order.staged.rename(final)
    sync(order.directory)
    if replaced.exists():
        discard(replaced)


def _describe(held: dict[str, Held]) -> tuple[dict[str, Leaf], list[str]]:
    """Each leaf for the manifest, and the names of those that are not finite."""

    def describe(leaf: Held) -> tuple[Leaf, bool]:
        pieces = leaf.pieces if not leaf.is_whole else [(_everywhere(leaf), leaf.value())]
        digests = {place_of(index, leaf.shape): digest_of(value) for index, value in pieces}
        finite = all(is_finite(value) for _, value in pieces)
        return Leaf(shape=leaf.shape, dtype=leaf.dtype.name, pieces=digests, key=leaf.key), finite

    described = dict(zip(held, in_parallel(describe, held.values()), strict=True))
    return {name: leaf for name, (leaf, _) in described.items()}, [
        n for n, (_, finite) in described.items() if not finite
    ]


def _everywhere(leaf: Held) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in leaf.shape)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)
