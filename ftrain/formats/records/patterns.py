"""Which files a list of paths and patterns stands for."""

import glob
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from ftrain.formats.records.sidecar import SUFFIX, is_sidecar
from ftrain.formats.records.writing import WRITING


def match_files(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that paths and glob patterns, ** included, stand for.

    They come in the order of the entries, sorted within a pattern, each file once. Patterns match neither directories
    nor sidecar indices nor files that are being written; a path that exists is no pattern, whatever is in its name.
    """
    entries = [files] if isinstance(files, str | Path) else list(files)
    if not entries:
        raise ValueError("files: got none; give at least one path or pattern")
    found: dict[str, Path] = {}
    for entry in entries:
        for path in _match(os.fspath(entry)):
            found.setdefault(os.path.abspath(path), path)
    return list(found.values())


def _match(entry: str) -> list[Path]:
    if os.path.isdir(entry):
        raise IsADirectoryError(f"{entry}: is a directory; for all the files in it write {os.path.join(entry, '*')}")
    if os.path.lexists(entry):
        return [Path(entry)]
    if not glob.has_magic(entry):
        raise FileNotFoundError(f"{entry}: there is no such file; {_nearby(entry)}")
    matches = sorted(glob.glob(entry, recursive=True))
    if paths := [Path(match) for match in matches if _is_data(match)]:
        return paths
    left_out = f" but {len(matches)} that are directories, indices or unfinished" if matches else ""
    raise FileNotFoundError(f"{entry}: matches no file{left_out}; {_nearby(entry)}")


def _is_data(path: str) -> bool:
    if os.path.isdir(path) or path.endswith(WRITING):
        return False
    return not (path.endswith(SUFFIX) and (os.path.exists(path.removesuffix(SUFFIX)) or is_sidecar(path)))


def _nearby(entry: str) -> str:
    """What there is where nothing was found."""
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
