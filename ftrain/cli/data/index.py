"""ftrain data index FILES..."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from ftrain.cli.data.arguments import DataCommandError, Files, match
from ftrain.cli.tables import show_bytes


def index(
    files: Files,
    skip_damaged: Annotated[
        bool,
        typer.Option(
            "--skip-damaged", help="Read everything, and leave damaged records out of the index."
        ),
    ] = False,
) -> None:
    """Write the index of each plain record file beside it, as FILE.index, for random access."""
    from ftrain.cli.data.progress import Bar, interruptible

    paths = match(files)
    for path in paths:
        _refuse_compressed(path)
    with interruptible(), Bar("indexing", paths) as bar:
        for path in paths:
            typer.echo(_index(path, "skip" if skip_damaged else "raise"))
            bar.finish(path)


def _index(path: Path, on_damage: Literal["raise", "skip"]) -> str:
    """Write the index of a file; return a line about it."""
    from ftrain.formats.conversion import advise, name_file
    from ftrain.formats.records.index import index_records, load_sidecar, sidecar_path

    with name_file(path), advise("--skip-damaged leaves damaged records out of the index"):
        fresh = load_sidecar(path, os.stat(path), on_damage) is not None
        found = index_records(path, on_damage=on_damage)
    sidecar = sidecar_path(path)
    if not fresh and load_sidecar(path, os.stat(path), on_damage) is None:
        raise DataCommandError(
            f"{sidecar} could not be written; check that its directory is writable, "
            f"and that {path} is not being changed"
        )
    left_out = f", {len(found.damages):,} damaged left out" if found.damages else ""
    state = "was up to date" if fresh else f"written, {show_bytes(sidecar.stat().st_size)}"
    size = show_bytes(found.size)
    return f"{path}: {len(found):,} records{left_out}, {size}; {sidecar.name} {state}"


def _refuse_compressed(path: Path) -> None:
    from ftrain.formats.records.encoding import detect_compression, plain_name

    if compression := detect_compression(path):
        command = shlex.join(["ftrain", "data", "convert", str(path), str(plain_name(path))])
        raise DataCommandError(
            f"{path} is compressed ({compression}), and only a plain file has random access\n"
            f"make a plain one with: {command}"
        )
