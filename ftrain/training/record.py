"""The record of a run: its code, settings and data, so that a different run does not resume it."""

import functools
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from ftrain.data import Pipeline
from ftrain.storage import exists, list_names, retry, write_text
from ftrain.training.compiled_step import CompiledStep
from ftrain.training.fingerprint import fingerprint, fingerprint_jaxpr
from ftrain.training.loss import LossFunction, call_loss
from ftrain.training.pieces import Piece
from ftrain.training.state import TrainState
from ftrain.training.step import Step, TrainStep
from ftrain.tree import Tree

NAME = "run.json"
_LIBRARIES = ("ftrain", "jax", "optax", "flax", "equinox", "dm-haiku")
_OF_A_RUN = re.compile(  # the names of files that a run writes
    r"checkpoints|crash|logs|eval|plugins|events\.out\.tfevents\..*|metrics\.jsonl(\.bad)?|"
    r"data\.json|run(\.\d+)?\.json|warm_start\.json|run\.lock(\.takeover)?|"
    r"config(\.\d+)?\.toml|faults_\d+\.txt"
)

Facts = dict[str, Any]


class RunMismatchError(ValueError):
    """The directory has a run with other code, settings or data; `differences` lists them."""

    def __init__(self, directory: Path, differences: list[str]):
        self.directory = directory
        self.differences = differences
        super().__init__(
            f"{directory} has a different run: {'; '.join(differences)}\n"
            "overwrite=True sets it aside and starts again, accept_changes=True resumes it "
            "with the changes; or choose another directory"
        )


class Recorder(Protocol):
    """Knows what a run is, and refuses to resume a different one. The loop calls it."""

    def check(self, program: CompiledStep, notice: Callable[[str], None]) -> None:
        """Called before the state is made; raises RunMismatchError if this is a different run."""

    def started(self, step: int, notice: Callable[[str], None]) -> None:
        """Called once the run has started after `step`, before it takes a step."""

    def write(self, state: TrainState, piece: Piece, notice: Callable[[str], None]) -> None:
        """Called after each call of the step, with its input, while `is_written` is False."""

    @property
    def is_written(self) -> bool:
        """Whether there is nothing to write."""
        ...


class RunRecord:
    """Writes the code, settings and data of a run to its directory; compares them when it resumes.

    The loss, the optimizer and the step are compared by fingerprints of their jaxprs, if they can
    be traced and the versions of the libraries are the same; the data by the summary of the
    pipeline.
    """

    def __init__(
        self,
        directory: Path,
        step: Step,
        program: CompiledStep,
        data: Any,
        settings: Mapping[str, Any],
    ):
        self._path = directory / NAME
        self._program = program
        self._step = step if isinstance(step, TrainStep) else None
        self._settings = {**settings, **(self._step.settings if self._step else {})}
        self._data = data.summary() if isinstance(data, Pipeline) else {}
        self.is_current = False  # whether the file is known to describe this run

    def find_differences(self, state: Callable[[], TrainState]) -> list[str]:
        """Return how this run differs from the one in the directory; `state` returns its shapes."""
        before = self._read()
        if before is None:
            return []
        differences = _changes(before["settings"], self._settings)
        differences += [f"data: {change}" for change in _changes(before["data"], self._data)]
        try:
            shapes = state()
            batch = None if before["batch"] is None else decode_shapes(before["batch"])
        except Exception:  # noqa: BLE001 - the error is raised again where they are used
            return differences
        now = self._fingerprints(before, shapes, batch)
        differences = self._differing_code(before, now, differences) + differences
        self.is_current = not differences and now.get("step") is not None
        return differences

    def write(self, state: TrainState, batch: Tree) -> None:
        """Write the record; an existing record that differs is renamed first."""
        now = {
            "made_with": _made_with(),
            "settings": self._settings,
            "data": self._data,
            "batch": encode_shapes(batch),
            "fingerprints": self._fingerprints(None, state, batch),
        }
        before = self._read()
        if before == json.loads(json.dumps(now)):
            return
        if before is not None:
            os.replace(self._path, _unused(self._path.parent / "run.{}.json"))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path, json.dumps(now, indent=1) + "\n")

    def _fingerprints(
        self, before: Facts | None, state: TrainState, batch: Tree
    ) -> dict[str, str | None]:
        """Return fingerprints of the code; with a record `before`, those that can be compared."""
        made_with = _made_with()
        then = made_with if before is None else before["made_with"]
        libraries = [name for name in made_with if name not in ("devices", "processes")]
        if any(made_with[name] != then.get(name) for name in libraries):
            return {}
        found: dict[str, str | None] = {}
        if self._step is not None:
            found["optimizer"] = _of_optimizer(self._step.optimizer, state)
        if made_with != then:  # code may depend on the number of devices
            return found
        found["step"] = self._of_step(state, batch)
        if self._step is not None and (
            before is None or found["step"] != before["fingerprints"].get("step")
        ):
            loss = functools.partial(_loss, self._step.loss_fn)
            found["loss"] = fingerprint(loss, state.params, batch, state.rng, state.model_state)
        return found

    def _of_step(self, state: TrainState, batch: Tree) -> str | None:
        """Return the fingerprint of the state that the step computes; metrics do not count."""
        try:
            traced = self._program.trace(state, batch)
            return (
                None if traced is None else fingerprint_jaxpr(traced, len(jax.tree.leaves(state)))
            )
        except Exception:  # noqa: BLE001 - the error is raised again where it is compiled
            return None

    def _differing_code(
        self, before: Facts, now: dict[str, str | None], named: list[str]
    ) -> list[str]:
        then = before["fingerprints"]
        differing = {
            name
            for name, value in now.items()
            if None not in (value, then.get(name)) and value != then[name]
        }
        if (
            "step" in now
            and "step" not in differing
            and None not in (now["step"], then.get("step"))
        ):
            differing &= {"optimizer"}  # the step is the same, even if the source code differs
        if differing & {"loss", "optimizer"}:
            return [f"the {name} differs" for name in ("optimizer", "loss") if name in differing]
        is_unexplained = "step" in differing and not any(
            text.split()[0] in _STEP_SETTINGS for text in named
        )
        return (
            ["the step differs (its loss, its optimizer or their settings)"]
            if is_unexplained
            else []
        )

    def _read(self) -> Facts | None:
        """Return the record; None if it is missing or cannot be read."""
        try:
            found = json.loads(retry(self._path.read_bytes))
            return (
                found
                if all(isinstance(found[part], dict) for part in _PARTS) and "batch" in found
                else None
            )
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return None


def set_aside(directory: Path) -> Path | None:
    """Move the files of a run in `directory` to `directory.1`, or the next unused number.

    Other files stay. Return the new path, or None if there was nothing to move.
    """
    directory = Path(os.path.realpath(directory))
    names = [name for name in retry(lambda: list_names(directory)) if _OF_A_RUN.fullmatch(name)]
    if not names:
        return None
    aside = _unused(directory.with_name(f"{directory.name}.{{}}"))
    aside.mkdir()
    for name in names:
        os.rename(directory / name, aside / name)
    return aside


def encode_shapes(batch: Tree) -> Any:
    """Encode the structure, shapes and dtypes of a batch for JSON.

    Returns None unless the batch consists of dicts with string keys, lists, tuples and arrays.

    >>> encode_shapes({"x": jnp.zeros((8, 2))})
    {'x': 'float32[8,2]'}
    """
    try:
        return _encode(batch)
    except TypeError:
        return None


def decode_shapes(encoded: Any) -> Tree:
    """Decode what `encode_shapes` returned to a batch of `jax.ShapeDtypeStruct`."""
    if isinstance(encoded, dict):
        return {name: decode_shapes(value) for name, value in encoded.items()}
    if isinstance(encoded, list):
        kind, *entries = encoded
        return {"list": list, "tuple": tuple}[kind](map(decode_shapes, entries))
    dtype, _, shape = encoded.rstrip("]").partition("[")
    return jax.ShapeDtypeStruct(tuple(int(size) for size in shape.split(",") if size), dtype)


_PARTS = ("made_with", "settings", "data", "fingerprints")
_STEP_SETTINGS = ("clip_global_norm", "accumulate", "averages")


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} was {before[name]!r}, now {value!r}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]


def _encode(batch: Any) -> Any:
    if type(batch) is dict and all(isinstance(name, str) for name in batch):
        return {name: _encode(value) for name, value in batch.items()}
    if type(batch) in (list, tuple):
        return [type(batch).__name__, *map(_encode, batch)]
    shape = getattr(batch, "shape", None)
    dtype = getattr(batch, "dtype", None)
    if shape is None or dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError
    return f"{dtype}[{','.join(map(str, shape))}]"


def _of_optimizer(optimizer: optax.GradientTransformation, state: TrainState) -> str | None:
    start = fingerprint(optimizer.init, state.params)
    update = fingerprint(
        lambda *given: optimizer.update(*given), state.params, state.opt_state, state.params
    )
    return None if None in (start, update) else f"{start}{update}"


def _loss(loss_fn: LossFunction, *given: Any) -> Any:
    """Return the loss without the metrics."""
    result = call_loss(loss_fn, *given)
    return result[0] if isinstance(result, tuple) else result


def _made_with() -> Facts:
    versions: Facts = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    devices = {"devices": jax.device_count(), "processes": jax.process_count()}
    return versions | {"backend": jax.default_backend()} | devices


def _unused(pattern: Path) -> Path:
    """Return the first path that does not exist, with 1, 2, ... in the place of the braces."""
    number = 1
    while exists(path := pattern.with_name(pattern.name.format(number))):
        number += 1
    return path
