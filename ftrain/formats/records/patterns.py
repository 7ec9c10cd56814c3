"""File patterns: the files that paths and glob patterns match."""

import fnmatch
import glob
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from ftrain.formats.records.sidecar import SUFFIX, is_sidecar
from ftrain.formats.records.writing import WRITING
from ftrain.paths import absolute, expanded
from ftrain.storage import is_directory, list_names, retry


def match_files(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that paths and glob patterns, including **, match.

    They come in the order of the entries, sorted within a pattern, each file once. Patterns match
    neither directories nor sidecar indices nor unfinished files. A path that exists is never taken
    as a pattern.
    """
    entries = [files] if isinstance(files, str | Path) else list(files)
    if not entries:
        raise ValueError("files is empty; give at least one path or pattern")
    found: dict[str, Path] = {}
    for entry in entries:
        for path in _match(expanded(entry)):
            found.setdefault(os.fspath(absolute(path)), path)
    return list(found.values())


def _match(entry: str) -> list[Path]:
    if os.path.isdir(entry):
        raise IsADirectoryError(
            f"{entry}: is a directory; for all the files in it write {os.path.join(entry, '*')}"
        )
    if os.path.lexists(entry):
        return [Path(entry)]
    if not glob.has_magic(entry):
        raise FileNotFoundError(f"{entry}: there is no such file; {_nearby(entry)}")
    matches = sorted(retry(lambda: _expand(entry)))
    if paths := [Path(match) for match in matches if _is_data(match)]:
        return paths
    left_out = f" but {len(matches)} that are directories, indices or unfinished" if matches else ""
    raise FileNotFoundError(f"{entry}: matches no file{left_out}; {_nearby(entry)}")


def _expand(pattern: str) -> list[str]:
    """Expand like `glob.glob(pattern, recursive=True)`, but raise if a listing fails."""
    head, tail = os.path.split(pattern)
    parents = [head]
    if glob.has_magic(head):
        parents = [path for path in _expand(head) if is_directory(Path(path or "."))]
    if tail == "**":
        return [path for parent in parents for path in _below(parent)]
    if not glob.has_magic(tail):
        return [path for parent in parents if os.path.lexists(path := os.path.join(parent, tail))]
    return [
        os.path.join(parent, name)
        for parent in parents
        for name in fnmatch.filter(_visible(parent, tail), tail)
    ]


def _below(directory: str) -> list[str]:
    """Return a directory, and everything below it except hidden names."""
    found = [os.path.join(directory, "")]
    for name in _visible(directory):
        path = os.path.join(directory, name)
        found += _below(path) if is_directory(Path(path)) else [path]
    return found


def _visible(directory: str, pattern: str = "") -> list[str]:
    """Return the names for a wildcard: hidden ones only if the pattern starts with a dot."""
    return [
        name
        for name in list_names(Path(directory or "."))
        if not name.startswith(".") or pattern.startswith(".")
    ]


def _is_data(path: str) -> bool:
    if os.path.isdir(path) or path.endswith(WRITING):
        return False
    return not (
        path.endswith(SUFFIX) and (os.path.exists(path.removesuffix(SUFFIX)) or is_sidecar(path))
    )


def _nearby(entry: str) -> str:
    """Describe the directory in which nothing was found."""
    directory = os.path.dirname(entry)
    while glob.has_magic(directory):
        directory = os.path.dirname(directory)
    shown = directory or "."
    if not os.path.isdir(shown):
        return f"its directory {shown} does not exist"
    names = [item.name for item in os.scandir(shown) if not item.is_dir()]
    nearest = get_close_matches(os.path.basename(entry), names, n=1)
    hint = f", the nearest name is {nearest[0]}" if nearest else ""
    return f"{shown} has {len(names)} {'file' if len(names) == 1 else 'files'}{hint}"
