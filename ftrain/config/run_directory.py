"""The run directory: it belongs to one config, and to one process or launcher at a time."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import tomli_w

from ftrain.checkpoints import hold
from ftrain.checkpoints.paths import CHECKPOINTS
from ftrain.config.load import ConfigError, Table, load, read_toml
from ftrain.config.plan import plan
from ftrain.config.shares import resolve_shares
from ftrain.launching.protocol import LAUNCHER
from ftrain.paths import RUN_CONFIG, RUN_LOCK
from ftrain.storage import exists, is_transient, list_names, replacing, retry

# Keys that may change when a run resumes: they do not change its numbers.
_NEUTRAL = ("run.directory", "data.threads", "data.workers", "mesh.", "sharding.", "cluster.")


def claim(directory: Path, resolved: Table, *, accept_changes: bool = False) -> IO[str]:
    """Claim `directory` for a config, and return the lock that keeps other processes out.

    The lock is held until it is closed or this process ends. Raises ConfigError if the directory
    belongs to another config, InUseError if a process uses it.
    """
    with _writing_to(directory):
        retry(lambda: (directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True))
        before = retry(lambda: _read_lock(directory / RUN_LOCK))
        lock = hold(directory / RUN_LOCK, f"run.directory: {directory} is in use")
        try:
            lock.write(_launcher_line(before, directory))
            lock.flush()
            retry(lambda: _write_config(directory, resolved, accept_changes))
        except BaseException:
            lock.truncate(0)
            lock.write(before)  # the owner stays the same
            lock.close()
            raise
    return lock


def _read_lock(path: Path) -> str:
    return path.read_text(errors="replace") if exists(path) else ""


def compare(directory: Path, resolved: Table) -> list[str]:
    """Return how the config of a directory differs; [] before its first checkpoint."""
    path = directory / RUN_CONFIG
    if not exists(path):
        return []
    try:
        before = read_toml(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nnothing was changed; repair it, delete it to start from the given config, "
            "or choose another run.directory"
        ) from None
    started = any(name[0].isdecimal() for name in list_names(directory / CHECKPOINTS))
    return describe_changes(_with_defaults(path, before), resolved) if started else []


def _with_defaults(path: Path, before: Table) -> Table:
    """Return a saved config with the defaults of keys that were added since it was written."""
    try:
        return plan(load(path)).resolved()
    except ConfigError:  # written by another version: only its own keys are known
        return before


def describe_changes(before: Table, after: Table) -> list[str]:
    """Return a phrase for each dotted key that differs; shares of the run count as steps."""
    old = flatten(_in_steps(before))
    new = flatten(_in_steps(after))
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key} was {_show(old, key)}, now {_show(new, key)}"
        for key in keys
        if not key.startswith(_NEUTRAL) and _show(old, key) != _show(new, key)
    ]


def _in_steps(table: Table) -> Table:
    steps = table.get("steps")
    return resolve_shares(table, steps)[0] if isinstance(steps, int) else table


def _write_config(directory: Path, resolved: Table, accept_changes: bool) -> None:
    """Write the config; raise if the directory has another one, unless changes are accepted."""
    differences = compare(directory, resolved)
    if differences and not accept_changes:
        raise ConfigError(
            f"{directory / RUN_CONFIG} belongs to another run: {'; '.join(differences)}\n"
            "choose another run.directory=PATH, or accept the changes with --accept-changes"
        )
    if differences:
        _unused(directory).write_bytes((directory / RUN_CONFIG).read_bytes())
    with replacing(directory / RUN_CONFIG, directory / f"{RUN_CONFIG}.new") as temporary:
        temporary.write_bytes(tomli_w.dumps(resolved).encode())


@contextmanager
def _writing_to(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:
        if is_transient(error):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"run.directory: {directory} cannot be written: {reason}; "
            "choose another run.directory=PATH"
        ) from None


def _unused(directory: Path) -> Path:
    number = 1
    while exists(path := directory / f"config.{number}.toml"):
        number += 1
    return path


def flatten(table: Table, prefix: str = "") -> dict[str, Any]:
    """Return every value by its dotted key, with numbers for the entries of arrays."""
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


def _launcher_line(before: str, directory: Path) -> str:
    """Return a line for the lock of a run directory that names the launcher of this process.

    `before` are the contents of the lock. If they name another launcher that is alive, it is about
    to restart its processes, and ConfigError reports that the directory is in use.
    """
    own = _signature(os.environ.get(LAUNCHER, ""))
    for signature in re.findall(r"^launcher .*$", before, re.MULTILINE):
        number = signature.split()[1]
        if signature not in (own, "") and signature == _signature(number):
            raise ConfigError(
                f"run.directory: {directory} is in use by ftrain launch, process {number}; "
                "wait for it, or choose another run.directory=PATH"
            )
    return f"{own}\n" if own else ""


def _signature(number: str) -> str:
    """Return a line for a live process of this host, or an empty string.

    It includes the start time, to distinguish the process from a later one with the same number.
    """
    try:
        fields = Path("/proc", number, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state = fields[0]  # the third field; the number and the name come first
    started = fields[19]
    if not number.isdecimal() or state in "ZX":
        return ""
    return f"launcher {number} {started} {socket.gethostname()}"
