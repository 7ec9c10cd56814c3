"""The run directory: a config is written there once, and only the same config may go on in it."""

import os
from pathlib import Path
from typing import Any

import tomli_w

from ftrain.config.load import ConfigError, Table, read_toml

CONFIG = "config.toml"


def claim(directory: Path, resolved: Table, *, accept_changes: bool = False) -> None:
    """Make `directory` the home of this config, or raise ConfigError if it is another one's."""
    path = directory / CONFIG
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write(path, resolved)
            return
    except OSError as error:
        raise ConfigError(
            f"run.directory: {directory} cannot be written: {error.strerror}; choose another, run.directory=PATH"
        ) from error
    differences = describe_changes(_read_back(path), resolved)
    if not differences:
        return
    if not accept_changes:
        raise ConfigError(
            f"{path} is of another run: {'; '.join(differences)}\n"
            f"choose another directory, run.directory=PATH, or go on in it with these changes, --accept-changes"
        )
    os.replace(path, _unused(directory))
    _write(path, resolved)


def describe_changes(before: Table, after: Table) -> list[str]:
    """One phrase for each dotted key that differs."""
    old, new = _flatten(before), _flatten(after)
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key} was {_show(old, key)}, now {_show(new, key)}"
        for key in keys
        if key != "run.directory" and (key in old) + (key in new) and old.get(key) != new.get(key)
    ]


def _read_back(path: Path) -> Table:
    try:
        return read_toml(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nnothing was changed; repair it, delete it to start from the config given here, "
            "or choose another run.directory"
        ) from None


def _write(path: Path, resolved: Table) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(tomli_w.dumps(resolved).encode())
    os.replace(beside, path)


def _unused(directory: Path) -> Path:
    number = 1
    while (path := directory / f"config.{number}.toml").exists():
        number += 1
    return path


def _flatten(table: Table, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _show(flat: dict[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "not set"
