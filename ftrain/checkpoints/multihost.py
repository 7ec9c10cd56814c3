"""Saving from several processes: they exchange what they wrote through files in the directory.

All of them see the directory, or they could not save there. Collectives would not work: saving runs
in a background thread, and all processes must call collectives in the same order.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jax

from ftrain.checkpoints.errors import SaveError
from ftrain.checkpoints.manifest import Leaf
from ftrain.storage import exists, write_text

_BASE_TIMEOUT = 300.0  # seconds that one process waits for another, before the bytes are counted
_MIN_BYTES_PER_SECOND = 20e6  # of a disk that many processes share
_POLL = 0.02  # seconds


def gather(
    staged: Path, leaves: dict[str, Leaf], nonfinite: list[str]
) -> tuple[dict[str, Leaf], list[str]]:
    """Return, on process 0, the leaves with the pieces of all processes, and the non-finite names.

    On the other processes the arguments are returned unchanged.
    """
    own = {"pieces": {name: leaf.pieces for name, leaf in leaves.items()}, "not_finite": nonfinite}
    write_text(_report_path(staged, jax.process_index()), json.dumps(own))
    if jax.process_index() != 0:
        return leaves, nonfinite
    paths = [_report_path(staged, process) for process in range(jax.process_count())]
    _wait(
        lambda: [path.name for path in paths if not exists(path)],
        f"{staged}: still waiting for",
        timeout_for(leaves),
    )
    reports = [json.loads(path.read_text()) for path in paths]
    failed = [
        f"process {process}: {report['error']}"
        for process, report in enumerate(reports)
        if "error" in report
    ]
    if failed:
        raise SaveError("; ".join(failed))
    for path in paths:
        path.unlink()
    complete: dict[str, Leaf] = {}
    for name, leaf in leaves.items():
        pieces = {at: digest for each in reports for at, digest in each["pieces"][name].items()}
        complete[name] = leaf.model_copy(update={"pieces": pieces})
    bad = {name for report in reports for name in report["not_finite"]}
    return complete, [name for name in leaves if name in bad]


def report_failure(staged: Path, error: Exception) -> None:
    """Report to process 0 that this process could not write its part."""
    with suppress(OSError):
        write_text(_report_path(staged, jax.process_index()), json.dumps({"error": str(error)}))


def remove_report(staged: Path) -> None:
    """Delete the report of this process about a checkpoint that was not finished."""
    _report_path(staged, jax.process_index()).unlink(missing_ok=True)


def timeout_for(leaves: dict[str, Leaf]) -> float:
    """Return how many seconds one process may wait for another to write these leaves."""
    return _BASE_TIMEOUT + sum(leaf.bytes for leaf in leaves.values()) / _MIN_BYTES_PER_SECOND


def wait_until_renamed(staged: Path, timeout: float) -> None:
    """Wait for process 0 to give a checkpoint its final name."""
    _wait(
        lambda: ["process 0 to finish it"] if exists(staged) else [],
        f"{staged}: still waiting for",
        timeout,
    )


def _report_path(staged: Path, process: int) -> Path:
    return staged.with_name(f"{staged.name}.process_{process}")


def _wait(find_missing: Callable[[], list[str]], what: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while missing := find_missing():
        if time.monotonic() > deadline:
            raise SaveError(f"{what} {', '.join(missing)} after {timeout:g} seconds")
        time.sleep(_POLL)
