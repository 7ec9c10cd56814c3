"""Loading: a TOML file, the files it extends and `key=value` overrides, as one table."""

import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftrain.paths import RUN_CONFIG, PathError, expanded
from ftrain.storage import raise_if_transient, retry

Table = dict[str, Any]
EXTENDS = "extends"  # the key that names the base of a config
LENGTHS = ("steps", "epochs")  # keys of the length of a run: a config has one of them
_RENAMED_HOOKS = {"Ledger": "DigestLog"}
_RENAMED_KEYS = (  # table, old key, new key
    ("checkpoint", "may_be_infinite", "allow_nonfinite"),
    ("sharding", "least", "min_size"),
)


class ConfigError(ValueError):
    """A mistake in a config or an override; the message is written for the user."""


@dataclass(frozen=True)
class Config:
    """The values of a config, and where each of them was written."""

    path: Path
    values: Table
    overridden: frozenset[str] = frozenset()  # dotted keys set on the command line
    tables: frozenset[str] = frozenset()  # keys at the top of the files
    notice: str | None = None  # a line for the user
    files: Mapping[str, Path] = field(default_factory=dict)  # of dotted keys, if one extends others

    def origin(self, key: str) -> str:
        """Return where the value of a dotted key was written: a file, or the command line."""
        inside = any(f"{key}.".startswith(f"{set_}.") for set_ in self.overridden)
        around = key not in self.tables and any(
            set_.startswith(f"{key}.") for set_ in self.overridden
        )
        return "command line" if inside or around else str(self._file(key))

    def _file(self, key: str) -> Path:
        while key and key not in self.files:
            key = key.rpartition(".")[0]
        return self.files.get(key, self.path)

    def error(self, key: str, message: str) -> ConfigError:
        """Return an error that names the key and where it was written."""
        shown = key if key.isprintable() else repr(key)
        return ConfigError(f"{self.origin(key)}: {shown}: {message}")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file and apply overrides such as `optimizer.learning_rate=0.01`.

    The directory of a run stands for the config in it, and becomes its run.directory, so that a run
    that was moved resumes where it is.
    """
    path = _checked(path)
    file = config_file(path)
    chain = _read_chain(file)
    values, files = _merge_chain(chain) if len(chain) > 1 else (chain[file], {})
    tables = frozenset(values)
    notice = None if file == path else _set_directory(path, values)
    parsed = [_parse_override(override) for override in overrides]
    overridden = frozenset(key for key, _ in parsed)
    for name in _replaced_lengths(overridden):
        values.pop(name, None)
    for key, value in parsed:
        _set(values, key, value)
    notice = None if "run.directory" in overridden else notice
    return Config(file, values, overridden, tables, notice, files)


def config_file(path: Path) -> Path:
    """Return the path of a config file, for a file or for the directory of a run."""
    if not path.is_dir():
        return path
    if (path / RUN_CONFIG).is_file():
        return path / RUN_CONFIG
    run = next((parent for parent in path.parents if (parent / RUN_CONFIG).is_file()), None)
    hint = f"; did you mean {run}?" if run is not None else _neighbours(path / RUN_CONFIG)
    raise ConfigError(
        f"{path}: is a directory without a {RUN_CONFIG}{hint}\n"
        "CONFIG is a TOML file, or the directory of a run that `ftrain train` made"
    )


def _read_chain(file: Path) -> dict[Path, Table]:
    """Read a config and the files that it extends, directly and indirectly, in this order."""
    chain = {file: read_toml(file)}
    seen = {os.path.realpath(file)}
    while (written := chain[file].pop(EXTENDS, None)) is not None:
        base = _base_path(file, written)
        if os.path.realpath(base) in seen:
            steps = " -> ".join(str(path) for path in [*chain, base])
            raise ConfigError(f"{file}: {EXTENDS}: {written!r} makes a cycle\n{steps}")
        try:
            chain[base] = read_toml(base)
        except ConfigError as error:
            raise ConfigError(
                f"{error}\n{file} extends it: {EXTENDS} = {written!r}, relative to that file"
            ) from None
        seen.add(os.path.realpath(base))
        file = base
    return chain


def _base_path(file: Path, written: Any) -> Path:
    if not isinstance(written, str) or not written.isprintable():
        raise ConfigError(f"{file}: {EXTENDS}: must be the path of a config, got {written!r:.60}")
    try:
        return file.parent / expanded(written)
    except PathError as error:
        raise ConfigError(f"{file}: {EXTENDS}: {error}") from None


def _merge_chain(chain: dict[Path, Table]) -> tuple[Table, dict[str, Path]]:
    """Merge a config into the files that it extends; return the values and the file of each key."""
    values: Table = {}
    files: dict[str, Path] = {}
    for file, table in reversed(chain.items()):
        if "task" in values and table.get("task", values["task"]) != values["task"]:
            _remove(values, "model", files)  # the arguments of the other task
        for name in _replaced_lengths(table):
            _remove(values, name, files)
        try:
            _merge(values, table, file, files)
        except RecursionError:
            raise ConfigError(f"{file}: has too many nested tables") from None
    return values, files


def _replaced_lengths(given: Collection[str]) -> list[str]:
    """Return the keys of a run's length that others replace: `steps` by `epochs`, or reversed."""
    return [name for name in LENGTHS if name not in given and not set(LENGTHS).isdisjoint(given)]


def _merge(
    values: Table, table: Table, file: Path, files: dict[str, Path], prefix: str = ""
) -> None:
    """Set the keys of a table in `values`: tables are merged, arrays and other values replaced."""
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict):
            if not _is_extended(values.get(name), value):
                _remove(values, name, files, prefix)
                values[name] = {}
            _merge(values[name], value, file, files, f"{key}.")
        else:
            _remove(values, name, files, prefix)
            values[name] = value
        files[key] = file


def _remove(values: Table, name: str, files: dict[str, Path], prefix: str = "") -> None:
    """Remove a key, and the files of all keys in its table."""
    values.pop(name, None)
    inside = [key for key in files if f"{key}.".startswith(f"{prefix}{name}.")]
    for key in inside:
        del files[key]


def _is_extended(base: Any, table: Table) -> bool:
    """True if a table adds to that of the base: not if it names another function, or a chain."""
    if not isinstance(base, dict) or table.get("name", base.get("name")) != base.get("name"):
        return False
    return not ("chain" in table and "name" in base)


def _set_directory(directory: Path, values: Table) -> str | None:
    """Set run.directory to where the run is; return a notice if the config names another."""
    table = values.setdefault("run", {})
    if not isinstance(table, dict):
        return None
    before = table.get("directory")
    table["directory"] = escape_braces(str(directory))
    if not isinstance(before, str) or Path(_unescaped(before)).resolve() == directory.resolve():
        return None
    return (
        f"{directory}: the run was moved and resumes here; "
        f"its config has run.directory = {before!r}"
    )


def escape_braces(directory: str) -> str:
    """Return a directory as run.directory, in which braces hold a key of the config."""
    return directory.replace("{", "{{").replace("}", "}}")


def _unescaped(directory: str) -> str:
    return directory.replace("{{", "{").replace("}}", "}")


def _checked(path: str | Path) -> Path:
    """Return the path of a config, not made absolute."""
    try:
        return Path(expanded(path))
    except PathError as error:
        raise ConfigError(str(error)) from None


def read_toml(path: Path) -> Table:
    """Return the contents of a TOML file; raise ConfigError if it cannot be read."""
    try:
        values = tomllib.loads(retry(lambda: path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_neighbours(path)}") from None
    except OSError as error:
        raise_if_transient(error, path)
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:  # ValueError: also too many digits
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    if path.name == RUN_CONFIG:
        _rename_saved_keys(values)
    return values


def _rename_saved_keys(values: Table) -> None:
    """Rename keys and hooks that an older version wrote to a run directory, so that it resumes."""
    for section, old, new in _RENAMED_KEYS:
        table = values.get(section)
        if isinstance(table, dict) and old in table:
            table.setdefault(new, table.pop(old))
    hooks = values.get("hooks")
    for hook in hooks if isinstance(hooks, list) else ():
        if isinstance(hook, dict) and hook.get("name") in _RENAMED_HOOKS:
            hook["name"] = _RENAMED_HOOKS[hook["name"]]


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if equals and key == EXTENDS:
        raise ConfigError(f"command line: {EXTENDS}: cannot be overridden; set it in the config")
    if not equals or not all(key.split(".")):
        raise ConfigError(
            f"command line: {override!r} is not an override; write key=value, for instance seed=1"
        )
    return key, _parse_value(text)


def _parse_value(text: str) -> Any:
    """Return a TOML value, or the text itself: so strings need no quotes in a shell."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _set(values: Table, key: str, value: Any) -> None:
    """Set a dotted key; a number selects the entry of an array."""
    *tables, last = key.split(".")
    place: Any = values
    for depth, name in enumerate(tables):
        place = (
            place[_index(place, name, tables[:depth])]
            if isinstance(place, list)
            else place.setdefault(name, {})
        )
        if not isinstance(place, (dict, list)):
            table = ".".join(tables[: depth + 1])
            raise ConfigError(
                f"command line: {key}: {table} is the value {place!r}, not a table with keys"
            )
    if isinstance(place, list):
        place[_index(place, last, tables)] = value
    else:
        place[last] = value


def _index(array: list[Any], name: str, tables: list[str]) -> int:
    if name.isdecimal() and int(name) < len(array):
        return int(name)
    known = f"0 to {len(array) - 1}" if array else "none"
    where = ".".join(tables)
    raise ConfigError(f"command line: {where}.{name}: {where} has {len(array)} entries, {known}")


def _neighbours(path: Path) -> str:
    near = (
        sorted(str(found) for found in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    )
    return f"; there are {', '.join(near[:5])}" if near else ""
