"""The run directory: one config lives there, and one process at a time works in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import tomli_w

from ftrain.checkpoints import hold
from ftrain.checkpoints.paths import CHECKPOINTS
from ftrain.config import launchers
from ftrain.config.load import ConfigError, Table, load, read_toml
from ftrain.config.plan import plan
from ftrain.storage import exists, is_transient, list_names, retry

CONFIG = "config.toml"
LOCK = "run.lock"
_NEUTRAL = (
    "run.directory",
    "data.threads",
    "data.workers",
    "mesh.",
    "sharding.",
    "cluster.",
)  # how, and not what


def claim(directory: Path, resolved: Table, *, accept_changes: bool = False) -> IO[str]:
    """Make `directory` the home of this config, or raise ConfigError if it is another one's, InUseError if in use.

    The answer is the lock that keeps other processes out, until it is closed or this process ends.
    """
    with _writing_to(directory):
        retry(lambda: (directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True))
        before = retry(lambda: _read_lock(directory / LOCK))
        lock = hold(directory / LOCK, f"run.directory: {directory} is in use")
        try:
            lock.write(launchers.sign(before, directory))
            lock.flush()
            retry(lambda: _settle(directory, resolved, accept_changes))
        except BaseException:
            lock.truncate(0)
            lock.write(before)  # it stays whose it was
            lock.close()
            raise
    return lock


def _read_lock(path: Path) -> str:
    return path.read_text(errors="replace") if exists(path) else ""


def compare(directory: Path, resolved: Table) -> list[str]:
    """How a config differs from the one that lives in a directory; a run without a checkpoint can still change."""
    path = directory / CONFIG
    if not exists(path):
        return []
    try:
        before = read_toml(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nnothing was changed; repair it, delete it to start from the config given here, "
            "or choose another run.directory"
        ) from None
    started = any(name[0].isdecimal() for name in list_names(directory / CHECKPOINTS))
    return describe_changes(_with_defaults(path, before), resolved) if started else []


def _with_defaults(path: Path, before: Table) -> Table:
    """A resolved config with the defaults of the keys that it lacks: those that were added since it was written."""
    try:
        return plan(load(path)).resolved()
    except ConfigError:  # of another version, say: then what stands in it is all that is known
        return before


def describe_changes(before: Table, after: Table) -> list[str]:
    """One phrase for each dotted key that differs."""
    old, new = flatten(before), flatten(after)
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key} was {_show(old, key)}, now {_show(new, key)}"
        for key in keys
        if not key.startswith(_NEUTRAL) and _show(old, key) != _show(new, key)
    ]


def _settle(directory: Path, resolved: Table, accept_changes: bool) -> None:
    """Write the config, unless another one lives there and its changes are not accepted."""
    differences = compare(directory, resolved)
    if differences and not accept_changes:
        raise ConfigError(
            f"{directory / CONFIG} is of another run: {'; '.join(differences)}\n"
            "choose another directory, run.directory=PATH, or go on in it with these changes, --accept-changes"
        )
    if differences:
        _unused(directory).write_bytes((directory / CONFIG).read_bytes())
    beside = directory / f"{CONFIG}.new"
    beside.write_bytes(tomli_w.dumps(resolved).encode())
    os.replace(beside, directory / CONFIG)


@contextmanager
def _writing_to(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:
        if is_transient(error):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"run.directory: {directory} cannot be written: {reason}; choose another, run.directory=PATH"
        ) from None


def _unused(directory: Path) -> Path:
    number = 1
    while exists(path := directory / f"config.{number}.toml"):
        number += 1
    return path


def flatten(table: Table, prefix: str = "") -> dict[str, Any]:
    """Every value by its dotted key; tables in an array are numbered."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = value
        if isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
            inner = {str(number): each for number, each in enumerate(value)}
        flat |= (
            flatten(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {prefix + key: value}
        )
    return flat


def _show(flat: dict[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "not set"
