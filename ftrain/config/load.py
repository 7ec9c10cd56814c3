"""Loading: a TOML file and `key=value` overrides, as one dict that remembers where each key came from."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrain.paths import PathError, expanded
from ftrain.storage import raise_if_transient, retry

Table = dict[str, Any]
RUN_CONFIG = "config.toml"  # the resolved config, inside of a run's directory
_RENAMED_KEYS = (  # table, old key, new key
    ("checkpoint", "may_be_infinite", "allow_nonfinite"),
    ("sharding", "least", "min_size"),
)


class ConfigError(ValueError):
    """A mistake in a config or an override; its message is for the person who made it."""


@dataclass(frozen=True)
class Config:
    path: Path
    values: Table
    overridden: frozenset[str] = frozenset()  # dotted keys set on the command line
    tables: frozenset[str] = frozenset()  # keys that the file has at its top
    notice: str | None = None  # what the user should know about it, in a line

    def origin(self, key: str) -> str:
        """Where the value of a dotted key was written."""
        inside = any(f"{key}.".startswith(f"{set_}.") for set_ in self.overridden)
        around = key not in self.tables and any(
            set_.startswith(f"{key}.") for set_ in self.overridden
        )
        return "command line" if inside or around else str(self.path)

    def error(self, key: str, message: str) -> ConfigError:
        shown = key if key.isprintable() else repr(key)
        return ConfigError(f"{self.origin(key)}: {shown}: {message}")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file and apply overrides such as `optimizer.learning_rate=0.01`.

    The directory of a run stands for the config in it; the run is then the one in that directory, also if it was moved.
    """
    path = _checked(path)
    file = config_file(path)
    values = read_toml(file)
    tables = frozenset(values)
    notice = None if file == path else _settle_in(path, values)
    parsed = [_parse_override(override) for override in overrides]
    for key, value in parsed:
        _set(values, key, value)
    overridden = frozenset(key for key, _ in parsed)
    return Config(
        file, values, overridden, tables, None if "run.directory" in overridden else notice
    )


def config_file(path: Path) -> Path:
    """The file of a config: the path itself, or, of the directory of a run, the config in it."""
    if not path.is_dir():
        return path
    if (path / RUN_CONFIG).is_file():
        return path / RUN_CONFIG
    around = next((parent for parent in path.parents if (parent / RUN_CONFIG).is_file()), None)
    way_out = f"; did you mean {around}?" if around is not None else _neighbours(path / RUN_CONFIG)
    raise ConfigError(
        f"{path}: is a directory without a {RUN_CONFIG}{way_out}\n"
        "CONFIG is a TOML file, or the directory of a run that `ftrain train` made"
    )


def _settle_in(directory: Path, values: Table) -> str | None:
    """Make a directory that of the run that its config describes; what there is to say if it says another."""
    table = values.setdefault("run", {})
    if not isinstance(table, dict):
        return None
    before, table["directory"] = table.get("directory"), str(directory)
    if not isinstance(before, str) or Path(before).resolve() == directory.resolve():
        return None
    return f"{directory}: the run is resumed here; its config says run.directory = {before!r}, from where it was moved"


def _checked(path: str | Path) -> Path:
    """The path of a config, as it was given."""
    try:
        return Path(expanded(path))
    except PathError as error:
        raise ConfigError(str(error)) from None


def read_toml(path: Path) -> Table:
    """The contents of a TOML file, or a ConfigError that says why it cannot be read."""
    try:
        values = tomllib.loads(retry(lambda: path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_neighbours(path)}") from None
    except OSError as error:
        raise_if_transient(error, path)
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:  # also numbers of more digits than Python takes
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    if path.name == RUN_CONFIG:
        _rename_saved_keys(values)
    return values


def _rename_saved_keys(values: Table) -> None:
    """Rename the keys that an older version wrote to the directory of a run, so that it resumes."""
    for section, old, new in _RENAMED_KEYS:
        table = values.get(section)
        if isinstance(table, dict) and old in table:
            table.setdefault(new, table.pop(old))


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(
            f"command line: {override!r} is not an override; write key=value, for instance seed=1"
        )
    return key, _parse_value(text)


def _parse_value(text: str) -> Any:
    """A TOML value, or, as quotes are a nuisance in a shell, the text itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _set(values: Table, key: str, value: Any) -> None:
    """Set a dotted key; a number chooses the entry of an array."""
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
    there = f"0 to {len(array) - 1}" if array else "none"
    where = ".".join(tables)
    raise ConfigError(f"command line: {where}.{name}: {where} has {len(array)} entries, {there}")


def _neighbours(path: Path) -> str:
    near = (
        sorted(str(found) for found in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    )
    return f"; there are {', '.join(near[:5])}" if near else ""
