"""Templates of the run directory: `runs/{task}-{optimizer.learning_rate}`."""

import re
import string
from typing import Any

from ftrain.config.load import Config, Table
from ftrain.suggestions import suggest

KEY = "run.directory"
_UNSAFE = re.compile(r"[^\w.+=@,-]+")  # of a value in a path


def expand_directory(template: str, resolved: Table, config: Config) -> str:
    """Return a directory with the value of a config's key in the place of each `{key}`.

    A value is part of one name: characters other than letters, digits and `._+=@,-` become `-`.
    Two braces are one.
    """
    if "{" not in template and "}" not in template:
        return template
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise config.error(
            KEY, f"{template!r} has unmatched braces ({error}); write {{{{ for a brace"
        ) from None
    expanded = ""
    for literal, key, spec, conversion in pieces:
        expanded += literal
        if key is None:
            continue
        if spec or conversion:
            raise config.error(
                KEY, f"{template!r} has a format in braces; expected a key, {{{key}}}"
            )
        expanded += _show(_find(key, resolved, config), key, config)
    if any(part in ("", ".", "..") for part in expanded.strip("/").split("/")):
        raise config.error(KEY, f"{template!r} becomes {expanded!r}, which has an empty name")
    return expanded


def _find(key: str, resolved: Table, config: Config) -> Any:
    value: Any = resolved
    for name in key.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value and key != KEY:
            value = value[name]
        elif key == "steps" and "epochs" in resolved:
            raise config.error(
                KEY, "{steps} is not known yet: the config has its length in epochs, {epochs}"
            )
        else:
            known = [*_scalars(resolved)]
            raise config.error(KEY, f"{{{key}}}: the config has no such key{suggest(key, known)}")
    return value


def _show(value: Any, key: str, config: Config) -> str:
    if isinstance(value, (dict, list)):
        inner = [*_scalars(value, f"{key}.")] if isinstance(value, dict) else []
        hint = f"; write {{{inner[0]}}}" if inner else ""
        hint = next((f"; write {{{each}}}" for each in inner if each.endswith("rate")), hint)
        kind = "a table" if isinstance(value, dict) else "an array"
        raise config.error(KEY, f"{{{key}}} is {kind}; expected a key with one value{hint}")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    safe = _UNSAFE.sub("-", text).strip("-")
    if not safe:
        raise config.error(KEY, f"{{{key}}} is {text!r}, of which no directory can be named")
    return safe


def _scalars(table: Table, prefix: str = "") -> dict[str, Any]:
    """Return every value that is no table and no array, by its dotted key."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _scalars(value, f"{prefix}{name}.")
        elif not isinstance(value, list) and prefix + name != KEY:
            flat[prefix + name] = value
    return flat
