"""Saving together: what the processes of a job tell each other about a checkpoint, through its directory.

The directory is one that all of them see, or they could not save there at all. Files are used and not collectives,
because saving goes on in a thread beside training, and collectives must be called in one order everywhere.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jax

from ftrain.checkpoints.errors import SaveError
from ftrain.checkpoints.manifest import Leaf
from ftrain.formats.whole_files import write_whole
from ftrain.storage import exists

_LIMIT = 300.0  # seconds that one process waits for another, and more for what is large:
_SLOWEST = 20e6  # bytes a second at which a disk that many share is still taken for alive
_POLL = 0.02


def gather(
    staged: Path, leaves: dict[str, Leaf], not_finite: list[str]
) -> tuple[dict[str, Leaf], list[str]]:
    """The leaves with the pieces of all processes, and those that are not finite on any."""
    own = {"pieces": {name: leaf.pieces for name, leaf in leaves.items()}, "not_finite": not_finite}
    write_whole(_note(staged, jax.process_index()), json.dumps(own))
    if jax.process_index() != 0:
        return leaves, not_finite
    notes = [_note(staged, process) for process in range(jax.process_count())]
    _wait(
        lambda: [note.name for note in notes if not exists(note)],
        f"{staged}: no word from",
        limit_for(leaves),
    )
    said = [json.loads(note.read_text()) for note in notes]
    failed = [
        f"process {process}: {each['error']}"
        for process, each in enumerate(said)
        if "error" in each
    ]
    if failed:
        raise SaveError("; ".join(failed))
    pieces = {
        name: {k: v for each in said for k, v in each["pieces"][name].items()} for name in leaves
    }
    for note in notes:
        note.unlink()
    bad = {name for each in said for name in each["not_finite"]}
    complete = {
        name: leaf.model_copy(update={"pieces": pieces[name]}) for name, leaf in leaves.items()
    }
    return complete, [name for name in leaves if name in bad]


def tell_failure(staged: Path, error: Exception) -> None:
    """Let the first process know that this one could not write its part."""
    with suppress(OSError):
        write_whole(_note(staged, jax.process_index()), json.dumps({"error": str(error)}))


def take_back(staged: Path) -> None:
    """Let nothing stay of what this process had to say about a checkpoint that was not finished."""
    _note(staged, jax.process_index()).unlink(missing_ok=True)


def limit_for(leaves: dict[str, Leaf]) -> float:
    """How long one process may wait for another to write or read so much."""
    return _LIMIT + sum(leaf.bytes for leaf in leaves.values()) / _SLOWEST


def wait_until_gone(staged: Path, limit: float) -> None:
    """Wait for the first process to give a checkpoint its name."""
    _wait(
        lambda: ["process 0 to finish it"] if exists(staged) else [],
        f"{staged} still waits for",
        limit,
    )


def _note(staged: Path, process: int) -> Path:
    return staged.with_name(f"{staged.name}.process_{process}")


def _wait(missing: Callable[[], list[str]], what: str, limit: float) -> None:
    deadline = time.monotonic() + limit
    while there := missing():
        if time.monotonic() > deadline:
            raise SaveError(f"{what} {', '.join(there)} after {limit:g} seconds")
        time.sleep(_POLL)
