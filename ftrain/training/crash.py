"""The crash bundle: everything that is needed to take a failed step again."""

import importlib.metadata
import json
import platform
import shutil
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ftrain.checkpoints import CheckpointManager
from ftrain.paths import local_path
from ftrain.storage import is_directory, list_names
from ftrain.training.loss import Batch
from ftrain.training.replay import PastStep, ReplayError
from ftrain.training.state import TrainState
from ftrain.tree import named_leaves

CRASHES = "crash"  # the directory of bundles, inside a run's
_FACTS = "crash.json"
_BATCH = "batch.npz"
_STATE = "state"
_VERSIONS = ("ftrain", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")


@dataclass(frozen=True)
class Crash:
    """A crash bundle on disk."""

    directory: Path
    facts: Mapping[str, Any]  # the contents of crash.json

    @property
    def step(self) -> int:
        """The step that failed."""
        return self.facts["step"]

    def state(self, like: TrainState) -> TrainState:
        """Return the newest available state before the failed step; see its `step`."""
        if not (self.directory / _STATE).exists():
            raise LookupError(f"{self.directory} has no state: {'; '.join(self.facts['notes'])}")
        return CheckpointManager(self.directory / _STATE).restore(like=like)

    def batch(self, like: Batch) -> Batch | None:
        """Return the batch of the failed step, structured like `like`; None if it was not kept."""
        if not (self.directory / _BATCH).exists():
            return None
        with np.load(self.directory / _BATCH) as arrays:
            leaves = [
                _typed(arrays[f"batch/{name}"], leaf) for name, leaf in named_leaves(like).items()
            ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def write_crash(run: Path, error: Exception, past: PastStep) -> Crash:
    """Write the bundle of a failed step to the directory of a run; replace an older one."""
    beside = run / CRASHES / f"{past.step}.new"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    notes = [*_keep_batch(beside, past)]
    state = _state_before(past, notes)
    if state is not None:
        CheckpointManager(beside / _STATE, allow_nonfinite=[".*"]).save(int(state.step), state)
    facts = {
        "step": past.step,
        "error": type(error).__name__,
        "message": str(error),
        "traceback": traceback.format_exception(error),
        "state_step": None if state is None else int(state.step),
        "rng": None if state is None else np.asarray(jax.random.key_data(state.rng)).tolist(),
        "batch": dict(past.identity),
        "notes": notes,
        "time": time.time(),
        "versions": versions(),
    }
    (beside / _FACTS).write_text(json.dumps(facts, indent=2), encoding="utf-8")
    final = beside.with_suffix("")
    shutil.rmtree(final, ignore_errors=True)
    beside.rename(final)
    return Crash(final, facts)


def read_crash(run: str | Path, step: int | None = None) -> Crash:
    """Return the bundle of a step, or the newest one; raise LookupError if there is none.

    crash = read_crash("runs/mine")
    state = crash.state(like=TrainState.create(...))  # its step may be some before crash.step
    ftrain.training.locate(step, state, crash.batch(like=data.batch(0)))
    """
    run = local_path(run)
    if not is_directory(run):
        raise LookupError(f"{run}: there is no such directory")
    there = sorted(int(name) for name in list_names(run / CRASHES) if name.isdecimal())
    if not there:
        raise LookupError(f"{run}: there is no crash to replay; {run / CRASHES} has no bundle")
    if step is not None and step not in there:
        raise LookupError(
            f"{run}: there is no crash of step {step}; the steps with one are "
            f"{', '.join(map(str, there))}"
        )
    if step is None:
        step = max(there, key=lambda each: (run / CRASHES / str(each) / _FACTS).stat().st_mtime)
    directory = run / CRASHES / str(step)
    return Crash(directory, _read_facts(directory / _FACTS))


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts["step"], int) or not isinstance(facts["notes"], list):
            raise ValueError("it has no step, or no notes")
        return facts | {"error": str(facts["error"]), "message": str(facts["message"])}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise LookupError(f"{path} is damaged: {error}; the bundle cannot be replayed") from None


def versions() -> dict[str, str]:
    """Return the versions of the libraries, the platform and the devices."""
    found = {name: importlib.metadata.version(name) for name in _VERSIONS}
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    return found | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": devices,
    }


def _typed(array: np.ndarray, like: Any) -> np.ndarray:
    """Return an array from a file in its dtype: numpy's files have no bfloat16 and the like."""
    return array.view(like.dtype) if array.dtype.kind == "V" else array


def _keep_batch(directory: Path, past: PastStep) -> list[str]:
    try:
        arrays: dict[str, Any] = {
            f"batch/{name}": np.asarray(leaf) for name, leaf in named_leaves(past.batch()).items()
        }
        np.savez(directory / _BATCH, **arrays)
    except (ReplayError, TypeError) as reason:  # it is lost, or cannot be written
        return [f"the batch is not kept: {reason}"]
    return []


def _state_before(past: PastStep, notes: list[str]) -> TrainState | None:
    for find in (past.state, past.start):
        try:
            return find()
        except ReplayError as reason:
            notes.append(str(reason))
    return None
